"""Who was on a GPU before its tenants, who came with them, who stayed."""

from gpumgr.ledger.quarantine import Quarantine, ended, released, sampled

GPU = "gpu"
DISPLAY, JOB, CHILD = (10, 1), (20, 2), (30, 3)


def yes(_: object) -> bool:
    return True


def no(_: object) -> bool:
    return False


def seen(state: Quarantine, *running: tuple[int, int], occupied: bool) -> Quarantine:
    return sampled(state, {GPU: list(running)}, {GPU} if occupied else ())


def test_processes_first_seen_while_the_gpu_was_free_never_hold_it() -> None:
    state = seen(Quarantine(), DISPLAY, occupied=False)
    state = seen(state, DISPLAY, JOB, occupied=True)
    assert state.tenants == {GPU: {JOB}}
    assert ended(state, [GPU], yes).held == {GPU: {JOB}}


def test_a_pid_that_was_used_again_is_another_process() -> None:
    state = seen(Quarantine(), DISPLAY, occupied=False)
    assert seen(state, (DISPLAY[0], 99), occupied=True).tenants == {GPU: {(DISPLAY[0], 99)}}


def test_tenants_that_ended_with_their_pod_cause_no_quarantine() -> None:
    state = seen(Quarantine(), JOB, occupied=True)
    after = ended(state, [GPU], no)
    assert not after.held
    assert not after.tenants


def test_a_sample_ends_the_quarantine_and_distinguishes_new_processes() -> None:
    state = ended(seen(Quarantine(), JOB, CHILD, occupied=True), [GPU], yes)
    assert state.reason(GPU) == "in quarantine: processes of an ended pod still run there (pid 20, 30)"
    state = seen(state, CHILD, DISPLAY, occupied=False)
    assert state.held == {GPU: {CHILD}}
    assert state.unattributed == {GPU: {DISPLAY}}
    state = seen(state, DISPLAY, occupied=False)
    assert state.reason(GPU) is None


def test_a_list_that_can_not_be_read_changes_nothing() -> None:
    state = ended(seen(Quarantine(), JOB, occupied=True), [GPU], yes)
    assert sampled(state, {}, ()) == state


def test_the_process_table_ends_the_quarantine() -> None:
    state = ended(seen(Quarantine(), JOB, CHILD, occupied=True), [GPU], yes)
    assert released(state, lambda process: process == JOB).held == {GPU: {JOB}}
    assert not released(state, no).held


def test_a_gpu_without_tenants_is_not_quarantined() -> None:
    assert ended(Quarantine(), [GPU], yes) == Quarantine()


def test_processes_that_have_ended_are_forgotten() -> None:
    state = seen(Quarantine(), DISPLAY, JOB, occupied=False)
    state = seen(state, JOB, CHILD, occupied=True)
    assert state.unattributed == {GPU: {JOB}}
    assert state.tenants == {GPU: {CHILD}}


def test_each_gpu_is_held_by_its_own_processes() -> None:
    state = sampled(Quarantine(), {GPU: [JOB], "other": [CHILD]}, {GPU, "other"})
    state = ended(ended(state, [GPU], yes), ["other"], yes)
    assert state.held == {GPU: {JOB}, "other": {CHILD}}
