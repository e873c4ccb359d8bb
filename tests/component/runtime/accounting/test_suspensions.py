"""Suspensions on a node of two GPUs with 2 GiB each: when containers are suspended and resumed, and what a next agent continues."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.common.errors import CheckpointError
from gpumgr.common.units import Amounts
from gpumgr.ledger.ledger import Allocation, MigDevice
from gpumgr.ledger.node_use import TurnUse
from gpumgr.ledger.suspension import HostMemory, Moved, State, Suspension
from gpumgr.placement.devices import NodeSample
from gpumgr.placement.pods import ResizeRequest
from gpumgr.runtime import suspensions
from tests.background import background
from tests.unit.ledger.samples import MIB, container
from tests.unit.web.metrics.pictures import whole

from .node import GPU, GPU1, PIDS, THIRD, WEB, Node, breathe, node_of, share, uses
from .test_bursts import A, T


def running(*, mechanism: str = "limiter", driver: str = "580.95.05", **fields: Any) -> Node:
    """The pod of `a` has these fields; its process uses 500 MiB."""
    node = node_of(share("a", 0b11, mechanism=mechanism), driver=driver)
    node.demands("a", **fields)
    return node


async def suspended() -> Node:
    """The same container, suspended by its annotation."""
    node = running(suspend=True)
    await sampled(node)
    return node


def two(*, a: Allocation = A, t: Allocation = T, **fields: Any) -> Node:
    """Two containers on one GPU; both pods have these fields."""
    node = node_of(a, t, memory_burst=True)
    for letter in "at":
        node.demands(letter, **fields)
    return node


def began(node: Node, state: State, mebibytes: int = 500, *, letter: str = "a", **fields: Any) -> None:
    """An earlier agent left this state of the container, which had so much memory on GPU 0."""
    pid = PIDS[letter]
    known = Suspension(state=state, processes=((pid, 10 * pid),), memory_bytes={GPU: mebibytes * MIB})
    node.agent_state.suspensions = {letter: replace(known, **fields)}


async def sampled(node: Node, sample: NodeSample | None = None, *, times: int = 1, after_seconds: float = 1.0) -> None:
    """Three evaluations each time: the operation that the first one began has ended, if the driver ends it."""
    for seconds in (after_seconds, 1.0, 1.0) * times:
        await node.sampled(sample or uses(a=500), after_seconds=seconds)


async def ask(node: Node) -> None:
    """A call of CUDA in the container of `a` waits."""
    node.backends.asking.add("a")
    looking = asyncio.create_task(node.memory_watcher.suspensions.run())
    await breathe()
    looking.cancel()


def moves(node: Node) -> list[tuple[str, int]]:
    """The operations that were counted, with their bytes."""
    return [(verb, size) for verb, _, size in (each.args for each in node.meter.moved.call_args_list)]


def state(node: Node) -> State | None:
    known = node.agent_state.suspensions.get("a")
    return None if known is None else known.state


async def test_states_are_saved_before_their_steps() -> None:
    node = await suspended()
    assert (node.mover.done, node.agent_state.saved) == ([("suspend", "a")], [("a", "suspending"), ("a", "suspended")])
    assert node.backends.held == {"a"}
    assert (moves(node), node.events("GpuSuspended")) == (
        [("suspend", 500 * MIB)],
        ["the container is suspended: 500 MiB of its GPU memory are in the host's memory"],
    )
    node.demands("a")
    await sampled(node, uses(a=0))
    assert node.agent_state.saved[2:] == [("a", "suspended"), ("a", "resuming"), ("a", "running"), ("a", None)]
    assert (node.backends.held, node.mover.done[1:]) == (set(), [("resume", "a")])


async def test_an_idle_container_is_suspended_and_its_call_resumes_it() -> None:
    node = running(suspend_when_idle_seconds=60.0)
    await sampled(node, after_seconds=50.0)
    await sampled(node, after_seconds=50.0)
    assert state(node) is None
    node.backends.by_turns = {("a", GPU): TurnUse(held_seconds=0.0, waited_seconds=0.0, launches=5, overruns=0)}
    await sampled(node, after_seconds=20.0)
    assert state(node) is None, "it worked"
    await sampled(node, after_seconds=60.0)
    assert state(node) == "suspended"
    await sampled(node, uses(a=0))
    await ask(node)
    await sampled(node, uses(a=0))
    assert (state(node), node.meter.resumed.call_count) == (None, 1)
    await sampled(node, after_seconds=50.0)
    assert state(node) is None, "the time begins again"


async def test_pages_are_read_again_and_again_only_while_a_container_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run sleeps until the first container is suspended, and then looks again at once."""
    waits = list[float | None]()

    async def noted(event: asyncio.Event, seconds: float | None) -> None:
        waits.append(seconds)
        await event.wait()

    monkeypatch.setattr(suspensions, "wait_at_most", noted)
    node = running(suspend=True)
    async with background(node.memory_watcher.suspensions.run()):
        await breathe()
        assert waits == [None]
        await sampled(node)
        assert (state(node), waits[-1]) == ("suspended", suspensions.POLL_SECONDS)
        node.demands("a")
        await sampled(node, uses(a=0))
        assert (state(node), waits[-1]) == (None, None)


async def test_the_nodes_setting_counts_without_an_annotation() -> None:
    node = running()
    node.apply(suspend_when_idle_seconds=90.0)
    await sampled(node, after_seconds=1.0)
    await sampled(node, after_seconds=100.0)
    assert state(node) == "suspended"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: running(suspend=True, driver="560.1"), "version 570 or newer"),
        (lambda: running(suspend_ignored="it must be true"), "it must be true"),
        (lambda: running(suspend_when_idle_seconds=60.0, mechanism="hami-core"), "only the backend limiter notices"),
    ],
)
async def test_a_refusal_is_reported_once_and_nothing_is_locked(make: Callable[[], Node], why: str) -> None:
    node = make()
    await sampled(node, after_seconds=60.0, times=3)
    (reason,) = node.events("GpuSuspendRefused")
    assert why in reason
    assert (node.mover.done, node.agent_state.saved, node.backends.held) == ([], [], set())


@pytest.mark.parametrize("earlier", [False, True])
async def test_one_container_is_suspended_at_a_time(earlier: bool) -> None:
    """The host has room for one, so the second is refused when the first has ended. `earlier`: an earlier agent began."""
    node = two(suspend=True)
    if earlier:
        began(node, "suspending", 800, letter="t")
    node.host_memory = HostMemory(node_bytes=1300 * MIB)
    node.mover.answers = [None]
    await sampled(node, uses(a=800, t=800))
    await sampled(node, uses(a=800, t=800))
    first, second = ("t", "a") if earlier else ("a", "t")
    assert node.mover.done == [("suspend", first)]
    node.host_memory = HostMemory(node_bytes=500 * MIB)
    node.mover.ends.set()
    await sampled(node, uses(a=800, t=800))
    assert node.mover.done == [("suspend", first)]
    assert [entry.id for entry in node.told if entry.code == "GpuSuspendRefused"] == [second]


async def test_the_host_must_hold_the_memory() -> None:
    node = running(suspend=True)
    node.host_memory = HostMemory(node_bytes=1 << 40, cgroup_bytes=600 * MIB)
    await sampled(node)
    assert "its memory limit leaves less" in node.events("GpuSuspendRefused")[0]
    node.host_memory = HostMemory(node_bytes=1 << 40)
    await sampled(node)
    assert state(node) == "suspended"


async def test_what_the_host_must_hold_is_measured_while_calls_are_held() -> None:
    """The container allocates until its calls are held, and the sample after that may be from before."""
    node = running(suspend=True)
    node.host_memory = HostMemory(node_bytes=1000 * MIB)
    await node.sampled(uses(a=500))
    assert (node.backends.held, state(node), node.awaited) == ({"a"}, "suspending", 1)
    await node.sampled(uses(a=500))
    assert node.mover.done == []
    await node.sampled(uses(a=600))
    assert (node.mover.done, node.mover.last.memory_bytes, state(node)) == ([("suspend", "a")], {GPU: 600 * MIB}, "suspended")
    assert node.agent_state.suspensions["a"].memory_bytes == {GPU: 600 * MIB}
    await sampled(node, uses(a=0))
    assert node.awaited == 0


@pytest.mark.parametrize("left", [1000, 800])
async def test_a_container_that_the_host_has_no_room_for_once_its_calls_are_held_runs_on(left: int) -> None:
    node = running(suspend=True)
    node.host_memory = HostMemory(node_bytes=1000 * MIB)
    await node.sampled(uses(a=500))
    await node.sampled(uses(a=500))
    node.host_memory = HostMemory(node_bytes=left * MIB)
    await node.sampled(uses(a=800))
    assert (node.mover.done, node.backends.held, state(node)) == ([], set(), None)
    (why,) = node.events("GpuSuspendRefused")
    assert "needs 1096 MiB of the host's memory, and the node has less" in why
    assert why.endswith("it runs on, and this is tried again")
    await sampled(node)
    assert node.backends.held == set(), "not at once"


async def test_calls_are_not_held_for_long_without_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspensions, "_SAMPLES_SECONDS", 0.0)
    node = running(suspend=True)
    await node.sampled(uses(a=500))
    assert (node.mover.done, node.backends.held, state(node)) == ([], set(), None)
    assert "the driver did not report its memory within 0 s" in node.events("GpuSuspendRefused")[0]


@pytest.mark.parametrize(
    ("moving", "used", "done", "memory", "ends"),
    [
        ("suspending", 600, ("suspend", "a"), 600, "suspended"),
        ("suspending", 0, ("suspend", "a"), 500, "suspended"),  # what was moved before the restart is not on the GPU
        ("resuming", 0, ("resume", "a"), 500, None),
    ],
)
async def test_an_operation_of_an_earlier_agent_is_continued_with_what_was_allocated_since(
    moving: State, used: int, done: tuple[str, str], memory: int, ends: State | None
) -> None:
    node = running(suspend=True if ends else None)
    began(node, moving)
    await sampled(node, uses(a=used))
    assert (node.mover.done, node.mover.last.memory_bytes, state(node)) == ([done], {GPU: memory * MIB}, ends)


async def test_a_suspension_that_an_earlier_agent_began_is_undone_if_the_host_has_no_room() -> None:
    """The earlier agent was killed before it had compared what the host has left; it may have stopped processes."""
    node = running(suspend=True)
    began(node, "suspending")
    node.host_memory = HostMemory(node_bytes=700 * MIB)
    await sampled(node)
    await sampled(node)
    assert (node.mover.done, state(node), node.backends.held) == ([("resume", "a")], None, set())


@pytest.mark.parametrize("moving", ["suspending", "resuming"])
async def test_no_burst_takes_memory_that_an_operation_of_an_earlier_agent_moves(moving: State) -> None:
    """The container had a burst itself, so the memory that it needs is more than its request."""
    node = two(limit=2048)
    began(node, moving, 900)
    node.mover.answers = [None]
    await node.sampled(uses(a=0, t=1100))
    assert node.limits["t"] == 1100
    await node.memory_watcher.close()


async def test_that_a_state_is_not_saved_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_key: str, _value: str) -> None:
        raise CheckpointError("no space left")

    node = running()
    node.backends.held.add("a")
    with monkeypatch.context() as full, capture_logs() as logs:
        full.setattr(node.agent_state.checkpoint, "save_note", fail)
        await sampled(node, uses(a=0))
    assert ([each["event"] for each in logs], state(node)) == (["suspension_not_saved"], None)
    await sampled(node, uses(a=0))
    assert node.mover.done == [("resume", "a")]


@pytest.mark.parametrize("unknown", ["container", "processes"])
async def test_a_suspended_container_without_a_saved_state_is_resumed_as_soon_as_it_is_known(unknown: str) -> None:
    node = running()
    node.backends.held.add("a")
    if unknown == "container":
        node.runtime.containers.clear()  # the runtime does not list it yet
    else:
        node.runtime.ended = {PIDS["a"]}  # its files can't be read
    await sampled(node, uses(a=0))
    assert (node.mover.done, state(node), node.backends.held) == ([], None, {"a"})
    node.runs(container("a", WEB), PIDS["a"])
    node.runtime.ended = set()
    await sampled(node, uses(a=0))
    assert (node.mover.done, state(node), node.backends.held) == ([("resume", "a")], None, set())


async def test_it_waits_for_what_it_was_granted() -> None:
    node = two(limit=2048)
    node.backends.held.add("a")
    await sampled(node, uses(a=0, t=1900), times=4)
    assert node.agent_state.suspensions["a"].memory_bytes == {GPU: 512 * MIB}
    assert "used by team/train (main) (1900 MiB)" in node.events("GpuResumeWaits")[0]
    await sampled(node, uses(a=0, t=100))
    assert (state(node), node.backends.held) == (None, set())


async def test_a_container_without_a_saved_state_does_not_wait_for_memory_that_it_has() -> None:
    """The checkpoint was lost, and the agent killed, after it had held the container's calls: nothing was moved."""
    node = running()
    node.backends.held.add("a")
    await sampled(node, uses(a=1800))
    assert (node.mover.done, state(node), node.backends.held) == ([("resume", "a")], None, set())


async def test_a_state_without_sizes_ends_no_evaluation() -> None:
    """An earlier version saved it for a container that may burst."""
    node = two(limit=2048)
    node.agent_state.suspensions = {"a": Suspension(state="suspended", processes=((PIDS["a"], 110),))}
    await sampled(node, uses(a=0, t=100))
    assert node.limits["a"] == 512


@pytest.mark.parametrize("asks", [False, True])
async def test_a_container_that_was_started_again_is_not_held(asks: bool) -> None:
    """The page is that of the first start, as with a claim, which is prepared once for a pod."""
    node = two(a=replace(A, limits={GPU: Amounts(1, 2048)}))
    node.demands("a", suspend=True)
    await sampled(node, uses(a=500, t=100))
    assert (state(node), node.backends.held) == ("suspended", {"a"})
    if asks:
        await sampled(node, uses(a=0, t=1900))
        await ask(node)
        assert node.events("GpuResumeWaits")
    node.demands("a")
    node.runtime.ended.add(PIDS["a"])
    node.runs(container("a", WEB, attempt=1), 99)
    await sampled(node, uses(t=1900))
    assert (state(node), node.backends.held) == (None, set())
    assert not node.events("GpuResumed")


async def test_a_resume_without_processes_moves_nothing() -> None:
    """The process that was suspended has ended, and its parent runs."""
    node = await suspended()
    node.mover.answers = [Moved()]
    node.demands("a")
    await sampled(node, uses(a=0))
    assert (state(node), node.backends.held) == (None, set())
    assert (moves(node), node.events("GpuResumed")) == ([("suspend", 500 * MIB)], [])


async def test_an_unknown_pod_changes_nothing() -> None:
    """It was resumed because it asked; then the API server does not answer for some time."""
    node = await suspended()
    await sampled(node, uses(a=0))
    await ask(node)
    await sampled(node)
    view = node.pods.views.pop(WEB)
    await sampled(node)
    node.pods.views[WEB] = view
    await sampled(node)
    assert (state(node), len(node.mover.done)) == ("running", 2)


async def test_a_container_whose_driver_does_not_answer_is_not_released() -> None:
    """An earlier agent was killed while it suspended the container, so its processes may be locked."""
    node = running()
    began(node, "suspending", required=(PIDS["a"],))
    node.backends.held.add("a")
    node.mover.answers = [Moved(held=[11], error="libcuda.so.1: not found", untouched=True)] * 6
    await sampled(node, uses(a=0), times=10)
    assert (state(node), node.backends.held) == ("resuming", {"a"})
    assert node.agent_state.suspensions["a"].reason == "libcuda.so.1: not found"
    assert len(node.mover.done) == 1 + 5, "after 1, 2, 4 and 8 s"
    assert len(node.events("GpuResumeWaits")) == 1
    assert node.mover.last.required == (11,)
    await sampled(node, uses(a=0), times=10)
    assert (state(node), node.backends.held) == (None, set())


async def test_a_refused_resume_names_the_other_containers_on_the_gpu() -> None:
    node = two()
    node.demands("a", suspend=True)
    await sampled(node, uses(a=500, t=100))
    node.mover.answers = [Moved(pids=[11], held=[11], error="CUDA error 2", out_of_memory=True)] * 3
    node.demands("a")
    await sampled(node, uses(a=0, t=100), times=3)
    (why,) = node.events("GpuResumeWaits")
    assert f"the driver found too little memory on GPU {GPU}, used by team/train (main) (100 MiB)" in why
    assert node.agent_state.suspensions["a"].reason in why


def without_memory(found: NodeSample) -> NodeSample:
    """The driver does not report the memory of the GPU."""
    return NodeSample(gpus={uuid: replace(each, memory_used_bytes=None) for uuid, each in found.gpus.items()})


async def test_no_memory_is_moved_while_the_free_memory_of_the_gpu_is_not_known() -> None:
    node = running(suspend=True)
    await sampled(node, without_memory(uses(a=500)))
    said = "the driver does not report how much memory of GPU"
    assert node.mover.done == []
    assert said in node.events("GpuSuspendRefused")[0]
    await sampled(node)
    node.demands("a")
    await sampled(node, without_memory(uses(a=0)))
    assert state(node) == "suspended"
    assert said in node.events("GpuResumeWaits")[0]
    await sampled(node, uses(a=0))
    assert (state(node), node.mover.done) == (None, [("suspend", "a"), ("resume", "a")])


@pytest.mark.parametrize("ends", [False, True])
async def test_a_resume_does_not_wait_for_ever_for_the_limit_of_another_and_ends_with_its_container(ends: bool) -> None:
    node = two(limit=2048)
    node.demands("a", suspend=True)
    await sampled(node, uses(a=500, t=1024))
    await sampled(node, uses(a=0, t=1024))
    node.backends.obstacles = {"t": "its pages can't be used"}
    node.demands("a")
    await sampled(node, uses(a=0, t=1024))
    await sampled(node, uses(a=0, t=1024))
    assert state(node) == "suspended"
    assert "limit of team/train (main) can't be lowered: its pages can't be used" in node.events("GpuResumeWaits")[0]
    if ends:
        node.runtime.ended.add(PIDS["a"])
        node.frees("a")
        await sampled(node, uses(t=1024))
    else:
        await sampled(node, uses(a=0, t=1024), after_seconds=20.0)
    assert (node.agent_state.suspensions, node.backends.held) == ({}, set())
    assert not node.memory_watcher.suspensions._reported


async def test_a_resume_waits_only_for_free_memory_while_the_runtime_has_listed_nothing() -> None:
    """After a restart of the agent; what the other container uses is not known, and its limit can't be lowered."""
    node = two()
    node.set_timeout(0.01)
    node.runtime.answers.clear()
    node.runtime.containers = []
    began(node, "suspended", asked_at=7.0)
    await sampled(node, uses(a=0, t=1600), after_seconds=20.0, times=2)
    assert state(node) == "suspended"
    await sampled(node, uses(a=0, t=1024))
    assert state(node) is None


async def test_a_reason_is_saved_once_a_minute_and_an_event_only_in_other_words() -> None:
    half = {GPU: Amounts(1, 2048)}
    node = two(a=replace(A, limits=half), t=replace(T, limits=half))
    node.holds(replace(share("b", 0b11 << 6), limits=half))
    node.runs(container("b", THIRD), PIDS["b"])
    node.demands("a", suspend=True)
    await sampled(node, uses(a=500, t=800, b=810))
    assert state(node) == "suspended"
    node.demands("a")
    reasons = set()
    for size in range(10):
        await sampled(node, uses(a=0, t=800 + 20 * (size % 2) + size, b=810 + size), after_seconds=60.0)
        reasons.add(node.agent_state.suspensions["a"].reason)
    assert len(reasons) == 10
    (first,) = node.events("GpuResumeWaits")
    assert "team/third" in first
    node.frees("b")
    await sampled(node, uses(a=0, t=1900), after_seconds=60.0)
    (_, last) = node.events("GpuResumeWaits")
    assert "team/third" not in last
    assert last.endswith(node.agent_state.suspensions["a"].reason)


@pytest.mark.parametrize(
    "failed",
    [
        Moved(pids=[11], error="process 11 can't be suspended"),
        Moved(held=[11], error="process 11 can't be suspended", untouched=True),
    ],
)
async def test_a_suspension_that_fails_leaves_the_container_running_and_is_tried_again_every_five_minutes(failed: Moved) -> None:
    node = running(suspend=True)
    node.mover.answers = [failed] * 5
    for _ in range(16):
        await sampled(node, after_seconds=60.0)
        assert (state(node), node.backends.held) == (None, set())
    assert node.mover.done == [("suspend", "a")] * 4
    assert "process 11 can't be suspended; it runs on" in node.events("GpuSuspendRefused")[0]
    assert node.mover.last.required == (11,)
    node.frees("a")
    node.holds(T)  # so that samples are evaluated
    await sampled(node, uses())
    node.frees("t")
    node.holds(A)
    await sampled(node)
    assert len(node.mover.done) == 5, "another container"


@pytest.mark.parametrize("verb", ["suspend", "resume"])
async def test_after_the_helper_was_killed_a_container_does_not_wait_for_its_own_memory(verb: str) -> None:
    """Its processes may be locked with all their memory on the GPU, which has no room for it twice."""
    node = running(suspend=True)
    killed = Moved(held=[11], error="the program ended")
    node.mover.answers = [killed] if verb == "suspend" else [Moved(pids=[11]), killed]
    await sampled(node, uses(a=1500))
    if verb == "resume":
        node.demands("a")
    await node.sampled(uses(a=1500 if verb == "suspend" or len(node.mover.done) > 1 else 0), times=9)
    verbs = [done for done, _ in node.mover.done]
    assert verbs == (["suspend", "resume"] if verb == "suspend" else ["suspend", "resume", "resume"])
    assert (state(node), node.backends.held) == ("running" if verb == "suspend" else None, set())


async def test_a_failed_process_ends_the_story_with_what_to_do() -> None:
    node = running(suspend=True)
    node.mover.answers = [Moved(pids=[11], failed=[11], error="CUDA error 304")]
    await sampled(node)
    assert (state(node), node.backends.held) == ("failed", set())
    assert "delete the pod" in node.events("GpuSuspendFailed")[0]
    await sampled(node)
    assert len(node.mover.done) == 1


@pytest.mark.parametrize(("lacks_memory", "ends"), [(True, "running"), (False, "failed")])
async def test_a_resume_is_tried_until_there_is_memory_and_fails_if_the_driver_cant(lacks_memory: bool, ends: State) -> None:
    node = await suspended()
    await sampled(node, uses(a=0))
    node.mover.answers = [Moved(pids=[11], held=[11], error="CUDA error", out_of_memory=lacks_memory)] * 4
    await ask(node)
    await sampled(node, uses(a=0), times=10)
    assert (state(node), bool(node.events("GpuSuspendFailed"))) == (ends, ends == "failed")


async def test_memory_of_a_suspended_container_serves_bursts_until_its_resume() -> None:
    """8 blocks: 2 are granted to `a`, 4 to `t`."""
    node = two(limit=2048)
    node.demands("a", suspend=True)
    await sampled(node, uses(a=500, t=1024))
    assert state(node) == "suspended"
    await sampled(node, uses(a=0, t=1024))
    assert node.limits["t"] == 2048
    await sampled(node, uses(a=0, t=1800))
    await ask(node)
    await sampled(node, uses(a=0, t=1800), times=3)
    assert (state(node), node.limits["t"]) == ("suspended", 1800)
    assert "used by team/train (main) (1800 MiB)" in node.events("GpuResumeWaits")[0]
    await sampled(node, uses(a=0, t=1500))
    assert state(node) == "running"


async def test_a_burst_comes_back_only_beside_what_others_were_granted() -> None:
    """1948 MiB are free, and 924 of them are granted to `t`."""
    node = two(limit=2048)
    began(node, "suspended", 1100, asked_at=7.0)
    await sampled(node, uses(a=0, t=100), times=3)
    assert node.agent_state.suspensions["a"].reason == f"it waits for 76 MiB of GPU {GPU}, used by team/train (main) (100 MiB)"


def oversubscribed(letter: str, place: int) -> Allocation:
    """It may use all of the GPU's memory, and holds four blocks from this one on."""
    return replace(share(letter, 0b1111 << place), limits={GPU: Amounts(1, 2048)})


async def test_oversubscribed_containers_wait_for_each_other_and_the_node_says_so() -> None:
    """Each counts with half of what it may use: 1024 of 2048 MiB."""
    node = two(a=oversubscribed("a", 0), t=oversubscribed("t", 4))
    node.demands("a", suspend=True)
    await node.sampled(uses(a=1500, t=100))
    (first,) = [entry for entry in node.told if entry.code == "overcommitted"]
    assert (first.what, first.gpus) == ("gpu", (GPU,))
    assert "may use 4096 MiB of memory together, and the GPU has 2048" in first.why
    said = [(entry.id, entry.why.rpartition(" and for ")[2]) for entry in node.told if entry.code == "GpuOvercommitted"]
    assert said == [("a", "team/train (main) (2048 MiB)"), ("t", "team/web (main) (2048 MiB)")]
    await sampled(node, uses(a=1500, t=100))
    assert state(node) == "suspended"
    await sampled(node, uses(a=0, t=1000))
    await ask(node)
    await sampled(node, uses(a=0, t=1000))
    assert state(node) == "suspended"
    assert [entry for entry in node.told if entry.code == "overcommitted"] == [first], "t fits alone"
    assert "it waits for 452 MiB of GPU 00000000, used by team/train (main) (1000 MiB)" in node.events("GpuResumeWaits")[0]
    await sampled(node, uses(a=0, t=500))
    assert state(node) == "running"


async def test_a_container_that_leaves_an_overcommitted_gpu_causes_no_events_of_the_others() -> None:
    node = Node(oversubscribed("a", 0), oversubscribed("t", 4), oversubscribed("b", 8))
    for _ in range(2):
        await node.sampled(uses(a=100, t=100))
        assert [entry.id for entry in node.told if entry.code == "GpuOvercommitted"] == ["a", "b", "t"]
        node.frees("b")


async def test_a_container_is_told_of_each_of_its_overcommitted_gpus() -> None:
    mine = {GPU: Amounts(1, 1024), GPU1: Amounts(1, 1024)}
    a = replace(A, gpus=mine, device_ids={}, limits=dict.fromkeys(mine, Amounts(1, 2048)))
    t = replace(T, gpus={GPU: Amounts(1, 1024)}, device_ids={}, limits={GPU: Amounts(1, 2048)})
    u = replace(t, id="u", pod=THIRD, gpus={GPU1: Amounts(1, 1024)}, limits={GPU1: Amounts(1, 2048)})
    node = Node(a, t, u)
    for _ in range(2):
        await node.sampled(uses(a=100))
        told = [(entry.id, entry.gpus) for entry in node.told if entry.code == "GpuOvercommitted"]
        assert told == [("a", (GPU,)), ("t", (GPU,)), ("a", (GPU1,)), ("u", (GPU1,))]


async def test_the_memory_of_a_container_that_was_resumed_or_failed_is_known() -> None:
    """`running` and `failed` stay for a long time: the limiter needs what the driver reports, and so does a resize to less."""
    for expected in ("running", "failed"):
        node = running(suspend=True)
        if expected == "failed":
            node.mover.answers = [Moved(pids=[PIDS["a"]], failed=[PIDS["a"]], error="CUDA error 304")]
        await sampled(node)
        if expected == "running":
            await sampled(node, uses(a=0))
            assert node.backends.seen[-1][1][0][0].memory_bytes[GPU] is None
            await ask(node)
        await sampled(node)
        assert state(node) == expected
        assert node.backends.seen[-1][1][0][0].memory_bytes[GPU] == 500 * MIB
        node.demands("a", suspend=True, resize=ResizeRequest(memory_mebibytes=501))
        await sampled(node)
        assert node.backends.seen[-1][1][0][0].tenant.gpus[0].limit_bytes == 501 * MIB


WHOLE = whole("a", WEB, 0)
BY_MIG = replace(
    WHOLE,
    device_ids={},
    gpus={GPU: Amounts(14, 256)},
    mig_devices=(MigDevice(gpu=GPU, profile="1g.10gb", memory_slices=1, uuid="MIG-1"),),
)


@pytest.mark.parametrize(("held", "what"), [(WHOLE, "whole GPUs"), (BY_MIG, "MIG devices")])
async def test_a_demand_for_a_container_without_a_share_is_refused_once(held: Allocation, what: str) -> None:
    node = Node(held)
    node.runs(container("a", WEB), PIDS["a"])
    for unwanted in ({}, {"suspend": False}, {"suspend_when_idle_seconds": 0.5}, {"suspend": True, "deleted": True}):
        node.demands("a", **unwanted)
        await sampled(node)
    assert not node.told
    for started in (False, True):
        node.demands("a", suspend=True, started=started)
        await sampled(node)
    (entry,) = node.told
    assert (entry.code, entry.pod) == ("GpuSuspendRefused", WEB)
    assert (
        entry.why == f"the container is not suspended: it has {what}, and only a container with a share of a GPU can be suspended"
    )
    assert not node.mover.done
    init = Node(replace(held, init=True))
    init.demands("a", suspend=True)
    await sampled(init)
    assert not init.told, "an init container's GPU is no obstacle"


async def test_an_init_container_that_has_ended_is_no_refused_one() -> None:
    node = Node(A, replace(A, id="i", container="prepare", init=True))
    node.demands("a", suspend=True)
    await sampled(node, uses())
    assert not node.events("GpuSuspendRefused"), "none of them runs"
    node.runs(container("a", WEB), PIDS["a"])
    await sampled(node)
    assert (state(node), node.events("GpuSuspendRefused")) == ("suspended", [])


async def test_a_demand_that_changes_all_the_time_moves_the_memory_once_a_minute() -> None:
    node = await suspended()
    for _ in range(5):
        node.demands("a")
        await sampled(node, uses(a=0))
        node.demands("a", suspend=True)
        await sampled(node)
    assert node.mover.done == [("suspend", "a"), ("resume", "a")]
    await sampled(node, after_seconds=60.0)
    assert state(node) == "suspended"
