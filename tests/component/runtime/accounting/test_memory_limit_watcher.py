"""The watcher's sample once a second: its reports, their frequency, and the effect of a slow runtime or a slow mechanism."""

import asyncio

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.ports import Finding, FindingCode
from gpumgr.common.units import BLOCK_BYTES, Amounts
from gpumgr.ledger.ledger import Allocation, ClaimRequest
from gpumgr.ledger.quarantine import EXPECTED_SECONDS
from gpumgr.placement.pods import ClaimUse, PodView
from gpumgr.runtime.container_events import SAME_FINDING_SECONDS
from gpumgr.runtime.process_owners import LONG_SECONDS, BackgroundCall
from tests.unit.ledger.samples import MIB, container, sample
from tests.unit.web.metrics.pictures import allocation, uuid_of, whole

from .node import GPU, GPU1, THIRD, TRAIN, WEB, Node, breathe, share

LIMIT = 2 * BLOCK_BYTES
A = share("a", 0b11, cores=0b11111, mechanism="hami-core")


def sharing(*, evict: bool = False, standalone: bool = False) -> Node:
    node = Node(A, evict=evict, standalone=standalone)
    node.runs(container("a", WEB), 10, 11, 12)
    return node


# -- what is seen --------------------------------------------------------------------------------------------------------------


async def test_a_shares_use_and_its_running_container_reach_the_mechanisms() -> None:
    node = sharing()
    node.pods.views[WEB] = PodView(namespace="team", name="web", uid="uid-a", core_limit=50)
    await node.sampled(sample({11: 5 * MIB}, {}, ratios={11: 0.5}))
    assert node.use.containers["a", GPU].memory_bytes == 5 * MIB
    assert [what for what, _ in node.backends.seen] == ["observe", "adjust"]
    ((running, mechanisms),) = node.backends.seen[0][1]
    assert mechanisms == ("hami-core",)
    assert (running.tenant.allocation, running.tenant.gpus[0].memory_bytes, running.tenant.core_limit) == ("a", LIMIT, 50)
    assert running.container.name == "main"
    assert running.pids == (10, 11, 12)
    assert running.gpu_pids == {11}
    assert node.runtime.asked == []


async def test_all_containers_of_a_shared_claim_count_for_its_allocation() -> None:
    claim = ClaimRequest(uid="u", namespace="team", name="c", request="gpu")
    node = Node(replace(A, claim=claim))
    for letter, pod in (("a", WEB), ("t", TRAIN)):
        uses = (ClaimUse(container="main", claim="c"),)
        node.pods.views[pod] = PodView(namespace=pod[0], name=pod[1], uid=f"uid-{letter}", claims=uses)
    node.runs(container("a", WEB), 10, 11)
    node.runs(container("t", TRAIN), 20, 21)
    await node.sampled(sample({11: LIMIT // 2, 21: LIMIT // 2}, {}), times=4)
    assert not node.use.unattributed
    assert node.use.containers["a", GPU].processes == {11: LIMIT // 2, 21: LIMIT // 2}
    assert not node.memory_watcher.over
    ((running, _),) = node.backends.seen[0][1]
    assert {each.id for each in running.containers} == {"a0" * 32, "t0" * 32}
    assert running.pids == (10, 11, 20, 21)
    assert running.gpu_pids == {11, 21}
    await node.sampled(sample({11: LIMIT // 2, 21: LIMIT}, {}), times=4)
    assert node.memory_watcher.over == {("a", GPU)}


async def test_annotations_of_another_pod_of_the_same_name_do_not_count() -> None:
    node = sharing()
    node.pods.views[WEB] = PodView(namespace="team", name="web", uid="uid-next", core_limit=50)
    await node.sampled(sample({}, {}))
    assert node.backends.seen[0][1][0][0].tenant.core_limit is None


async def test_the_newest_start_of_a_container_is_the_one_that_runs() -> None:
    node = sharing()
    node.runtime.containers.insert(0, container("a", WEB, attempt=3))
    node.runtime.inside["a3" * 32] = (30,)
    await node.sampled(sample({30: 7}, {}))
    ((running, _),) = node.backends.seen[0][1]
    assert (running.container.attempt, running.pids) == (3, (30,))


async def test_a_container_that_does_not_run_yet_is_not_observed() -> None:
    node = Node(A)
    await node.sampled(sample({}, {}))
    assert node.backends.seen == [("observe", []), ("adjust", [])]
    assert node.use.containers["a", GPU].process_count == 0


async def test_a_process_that_came_after_its_cgroup_was_read_is_among_the_containers() -> None:
    node = sharing()
    node.runtime.elsewhere[5] = container("a", WEB)
    await node.sampled(sample({5: 7, 11: 1}, {}))
    ((running, _),) = node.backends.seen[0][1]
    assert running.pids == (5, 10, 11, 12)
    assert running.gpu_pids == {5, 11}


async def test_a_process_whose_leader_has_no_start_time_is_still_its_containers() -> None:
    """A tenant can't hide by ending its first thread: such a process looks dead in /proc and is in its cgroup."""
    node = sharing()
    await node.sampled(sample({11: 5}, {}), gone={11})
    assert node.use.containers["a", GPU].memory_bytes == 5


async def test_processes_are_looked_up_once_and_again_while_the_runtime_does_not_answer() -> None:
    node = Node(A, whole("t", TRAIN, 1))
    node.runtime.unavailable = True
    await node.sampled(sample({}, {21: 7}))
    assert (node.use.unknown, len(node.use.unattributed)) == (frozenset({(GPU1, 21)}), 0)
    node.runtime.unavailable = False
    node.runtime.elsewhere[21] = container("t", TRAIN)
    for _ in range(3):
        await node.sampled(sample({}, {21: 7}))
        assert not node.use.unattributed
    assert node.runtime.asked == [21, 21]
    assert node.use.containers["t", GPU1].memory_bytes == 7


async def test_unreadable_cgroups_are_reported_once_and_processes_are_looked_up_individually() -> None:
    node = sharing()
    node.runtime.cgroups_broken = True
    node.runtime.elsewhere[11] = container("a", WEB)
    with capture_logs() as logs:
        await node.sampled(sample({11: 5}, {}), times=3)
    assert [entry["event"] for entry in logs] == ["container_processes_unknown"]
    assert node.use.containers["a", GPU].memory_bytes == 5


@pytest.mark.parametrize("record", ["of gpu-manager", "before its memory call"])
async def test_a_record_without_a_limit_of_ours_can_not_be_over(record: str) -> None:
    without = replace(allocation("a", WEB, cores={0: 0b11111}), mechanisms=("hami-core",))
    node = Node(replace(A, anonymous=True) if record == "of gpu-manager" else without)
    assert node.memory_watcher.needs_process_utilization() == (record != "of gpu-manager")
    node.runs(container("a", WEB), 11)
    await node.sampled(sample({11: 10 * LIMIT}, {}), times=5)
    assert not node.memory_watcher.over


async def test_ended_containers_are_no_longer_observed() -> None:
    node = sharing()
    await node.sampled(sample({11: LIMIT + 1}, {}), times=3)
    assert node.memory_watcher.over == {("a", GPU)}
    node.frees("a")
    assert not node.use.containers
    assert not node.memory_watcher.over
    assert not node.memory_watcher.needs_process_utilization()


# -- over the limit ------------------------------------------------------------------------------------------------------------


async def test_a_container_over_its_memory_is_reported_once_with_numbers() -> None:
    node = sharing()
    with capture_logs() as logs:
        await node.sampled(sample({11: LIMIT, 12: 300 * MIB}, {}), times=5)
    assert node.memory_watcher.over == {("a", GPU)}
    assert node.meter.went_over.call_count == 1
    (told,) = node.told
    assert (told.what, told.id, told.pod, told.pod_uid, told.container) == ("event", "a", WEB, "uid-a", "main")
    assert (told.code, told.gpus, told.at) == ("GpuMemoryOverLimit", (GPU,), 7.0)
    assert f"may use 512 MiB of memory on {uuid_of(0)}, and used more than this plus the tolerance of 0 MiB" in told.why
    assert "evicted" not in told.why
    assert not node.evicted
    assert [(entry["event"], entry["holder"], entry["memory_bytes"]) for entry in logs] == [
        ("container_over_limit", "team/web (main)", 812 * MIB)
    ]


async def test_a_container_is_over_its_memory_on_one_of_its_gpus() -> None:
    parts = {GPU: Amounts(20, 256), GPU1: Amounts(70, 512)}
    node = Node(Allocation(id="a", pod=WEB, uid="uid-a", container="main", gpus=parts, mechanisms=("hami-core",)))
    node.runs(container("a", WEB), 11, 12)
    await node.sampled(sample({11: 300 * MIB}, {12: 300 * MIB}), times=3)
    assert node.memory_watcher.over == {("a", GPU)}
    assert [told.gpus for told in node.told] == [(GPU,)]
    ((running, _),) = node.backends.seen[0][1]
    assert running.gpu_pids == {11, 12}


async def test_the_return_below_the_limit_is_reported_too_and_each_crossing_has_the_same_message() -> None:
    """So that it is one event."""
    node = sharing()
    with capture_logs() as logs:
        for used in (LIMIT + 1, LIMIT, LIMIT + 5 * MIB, LIMIT, LIMIT + 300 * MIB, LIMIT):
            await node.sampled(sample({11: used}, {}), times=3)
    assert not node.memory_watcher.over
    assert [entry["event"] for entry in logs] == ["container_over_limit", "container_within_limit"] * 3
    assert (node.meter.went_over.call_count, len(node.told), len({told.why for told in node.told})) == (3, 3, 1)


async def test_the_pod_of_a_container_over_its_limit_is_evicted_if_configured() -> None:
    node = sharing(evict=True)
    await node.sampled(sample({11: LIMIT + 1}, {}), after_seconds=60, times=60)
    assert node.evicted[-1] == {"uid-a": (WEB, "container main stayed over its GPU memory")}
    assert {call.args[0] for call in node.publisher.evict.call_args_list} == {"memory limit"}
    assert node.meter.evicted.call_count == 1
    over, evicted = node.told
    assert "; the pod is evicted" in over.why
    assert (evicted.what, evicted.code, evicted.id, evicted.pod, evicted.pod_uid) == ("event", "GpuPodEvicted", "a", WEB, "uid-a")
    assert evicted.why == "the pod is evicted: container main stayed over its GPU memory"


async def test_a_user_of_a_claim_whose_first_user_has_ended_is_evicted() -> None:
    node = Node(replace(A, claim=ClaimRequest(uid="u", namespace="team", name="c", request="gpu")), evict=True)
    uses = (ClaimUse(container="main", claim="c"),)
    node.pods.views[TRAIN] = PodView(namespace="team", name="train", uid="uid-t", claims=uses)
    node.runs(container("t", TRAIN), 20, 21)
    await node.sampled(sample({21: 2 * LIMIT}, {}), times=4)
    assert {uid: pod for uid, (pod, _) in node.evicted[-1].items()} == {"uid-t": TRAIN}
    assert {(entry.pod, entry.pod_uid) for entry in node.told} == {(TRAIN, "uid-t")}


async def test_who_is_within_its_memory_again_or_gone_is_not_evicted_any_more() -> None:
    node = Node(A, share("b", 0b1100), evict=True)
    node.runs(container("a", WEB), 11)
    node.runs(container("b", THIRD), 21)
    both = sample({11: LIMIT + 1, 21: LIMIT + 1}, {})
    await node.sampled(both, times=3)
    assert [*node.evicted[-1]] == ["uid-a", "uid-b"]
    await node.sampled(sample({11: LIMIT, 21: LIMIT + 1}, {}), times=2)
    assert [*node.evicted[-1]] == ["uid-a", "uid-b"]
    await node.sampled(sample({11: LIMIT, 21: LIMIT + 1}, {}))
    assert [*node.evicted[-1]] == ["uid-b"]
    node.frees("b")
    await node.sampled(sample({11: LIMIT}, {}))
    assert not node.evicted[-1]


async def test_pods_over_their_limit_are_not_evicted_after_the_setting_changes() -> None:
    node = sharing(evict=True)
    await node.sampled(sample({11: LIMIT + 1}, {}), times=3)
    node.apply(evict=False)
    await node.sampled(sample({11: LIMIT + 1}, {}))
    assert not node.evicted[-1]


async def test_without_an_api_server_no_pod_is_evicted() -> None:
    node = sharing(evict=True, standalone=True)
    with capture_logs() as logs:
        await node.sampled(sample({11: LIMIT + 1}, {}), times=3)
    assert [entry["event"] for entry in logs] == ["container_over_limit", "not_evicted"]
    assert node.meter.evicted.call_count == 0
    assert [told.code for told in node.told] == ["GpuMemoryOverLimit"]


async def test_the_uid_comes_from_the_runtime_where_the_ledger_has_none() -> None:
    node = Node(replace(A, uid=None), evict=True)
    node.runs(container("a", WEB), 11)
    await node.sampled(sample({11: LIMIT + 1}, {}), times=3)
    assert {uid: pod for uid, (pod, _) in node.evicted[-1].items()} == {"uid-a": WEB}


# -- unattributed processes ----------------------------------------------------------------------------------------------------


async def test_an_unattributed_process_is_logged_once_if_it_stays() -> None:
    """On an H200 a container with 35 GiB leaves the driver's list half a second after its pod's end."""
    node = sharing()
    with capture_logs() as logs:
        await node.sampled(sample({99: 5}, {99: 6}))
        await node.sampled(sample({99: 5}, {99: 6}), after_seconds=EXPECTED_SECONDS - 1)
        assert not logs
        await node.sampled(sample({99: 5}, {99: 6}))
        await node.sampled(sample({99: 5}, {99: 6}))
        await node.sampled(sample({}, {}))
    assert [entry["event"] for entry in logs] == ["gpu_process_unattributed"]
    assert (logs[0]["pid"], logs[0]["gpus"], logs[0]["memory_bytes"]) == (99, (GPU, GPU1), 11)
    assert node.use.gpus[GPU].processes == 0


async def test_a_process_that_has_ended_since_it_was_listed_is_not_unattributed() -> None:
    node = sharing()
    node.runtime.ended = {99}
    with capture_logs() as logs:
        await node.sampled(sample({99: 5}, {}))
        assert not node.use.unattributed
        assert node.use.unknown == {(GPU, 99)}
        await node.sampled(sample({}, {}))
    assert not logs


# -- findings ------------------------------------------------------------------------------------------------------------------


def finding(code: FindingCode = "tampered", of: str = "a") -> tuple[str, Finding]:
    return "hami-core", Finding(allocation=of, code=code, message=f"it was {code}")


async def test_a_finding_is_reported_once_and_repaired_afterwards() -> None:
    node = sharing()
    node.backends.findings = [finding("tampered"), finding("broken"), finding(of="z")]  # the last one's has ended
    with capture_logs() as logs:
        await node.sampled(sample({}, {}), times=3)
    assert [each.args for each in node.meter.found.call_args_list] == [("hami-core", "tampered"), ("hami-core", "broken")]
    assert [(told.pod_uid, told.code, told.why) for told in node.told] == [
        ("uid-a", "GpuLimitTampered", "it was tampered"),
        ("uid-a", "GpuLimitBroken", "it was broken"),
    ]
    assert [entry["event"] for entry in logs] == ["enforcement_finding"] * 2
    assert [what for what, _ in node.backends.seen] == ["observe", "adjust"] * 3


async def test_a_recurring_finding_is_reported_again_only_after_a_while() -> None:
    node = sharing()
    with capture_logs() as logs:
        for found in ([finding()], [], [finding()], []):
            node.backends.findings = found
            await node.sampled(sample({}, {}))
        assert len(node.told) == 1
        await node.sampled(sample({}, {}), after_seconds=SAME_FINDING_SECONDS)
        node.backends.findings = [finding()]
        await node.sampled(sample({}, {}))
    assert [entry["event"] for entry in logs] == ["enforcement_finding", "enforcement_finding"]
    assert len(node.told) == 2


# -- patience ------------------------------------------------------------------------------------------------------------------


async def test_a_runtime_that_hangs_delays_one_sample_and_the_last_list_counts() -> None:
    node = Node(A, whole("t", TRAIN, 1))
    node.runs(container("a", WEB), 11)
    node.runtime.elsewhere[21] = container("t", TRAIN)
    await node.sampled(sample({11: 1}, {21: 1}))
    node.runtime.answers.clear()
    node.set_timeout(0.05)
    await node.sampled(sample({11: 2}, {21: 2, 22: 3}), times=3)
    assert node.use.containers["a", GPU].memory_bytes == 2
    assert node.use.containers["t", GPU1].memory_bytes == 2
    assert node.use.unknown == {(GPU1, 22)}
    assert node.runtime.ticks == 2
    assert node.runtime.asked == [21, 22]
    node.runtime.elsewhere[22] = container("t", TRAIN)
    node.runtime.answers.set()
    node.set_timeout(60)
    await breathe()
    await node.sampled(sample({11: 2}, {21: 2, 22: 3}))
    assert node.use.containers["t", GPU1].memory_bytes == 5
    await node.memory_watcher.close()


async def test_a_mechanism_that_hangs_is_not_called_twice_at_once() -> None:
    node = sharing()
    node.backends.ready.clear()
    node.set_timeout(0.05)
    for used in (1, 2, 3):
        await node.sampled(sample({11: used}, {}))
    assert [what for what, _ in node.backends.seen] == ["observe"]
    assert node.use.containers["a", GPU].memory_bytes == 3
    node.backends.ready.set()
    node.set_timeout(60)
    await breathe()
    await node.sampled(sample({11: 4}, {}))
    assert [what for what, _ in node.backends.seen] == ["observe", "adjust", "observe", "adjust"]


async def test_a_bug_in_a_mechanism_is_not_swallowed_and_one_that_shows_late_comes_out_with_the_next_sample() -> None:
    node = sharing()
    node.backends.bug = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        await node.sampled(sample({}, {}))
    node.backends.ready.clear()
    node.set_timeout(0.05)
    await node.sampled(sample({}, {}))
    node.backends.bug = ValueError("a late bug")
    node.backends.ready.set()
    await breathe()
    with pytest.raises(ValueError, match="a late bug"):
        await node.sampled(sample({}, {}))


async def test_close_cancels_the_background_calls() -> None:
    node = sharing()
    node.runtime.answers.clear()
    node.backends.ready.clear()
    node.set_timeout(0.05)
    await node.sampled(sample({99: 5}, {}))
    out = {"list_containers", "look_up_processes", "enforce_limits"}
    assert {task.get_name() for task in asyncio.all_tasks()} >= out
    await node.memory_watcher.close()
    assert not {task.get_name() for task in asyncio.all_tasks()} & out


async def test_a_call_that_takes_long_is_logged_once() -> None:
    now, never = [0.0], asyncio.Event()
    call = BackgroundCall("look", clock=lambda: now[0])

    async def work() -> None:
        await never.wait()

    with capture_logs() as lines:
        await call.start(work, timeout_seconds=0)
        now[0] = LONG_SECONDS - 1
        await call.start(work, timeout_seconds=0)
        assert lines == []
        now[0] = LONG_SECONDS + 1
        await call.start(work, timeout_seconds=0)
        await call.start(work, timeout_seconds=0)
    assert [(line["event"], line["call"]) for line in lines] == [("background_call_takes_long", "look")]
    await call.close()
