"""Which containers can be suspended, when, and in which order they are resumed."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.units import Amounts
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.node_use import ContainerUse, TurnUse
from gpumgr.ledger.suspension import (
    AGAIN_SECONDS,
    Activity,
    HostMemory,
    Suspension,
    activity,
    ahead,
    idle_seconds_to_suspend,
    next_step,
    obstacle,
    waits_for,
)
from gpumgr.placement.pods import PodView

GIB = 1 << 30
MIB = 1 << 20
SHARE = Allocation(id="a", gpus={"g": Amounts(10, 4096)}, mechanisms=("limiter",))
USE = ContainerUse(allocation="a", gpu="g", uuid="GPU-g", memory_bytes=4 * GIB, utilization_ratio=0.0)


def turns(launches: int, **kinds: int) -> TurnUse:
    return TurnUse(held_seconds=0.0, waited_seconds=0.0, launches=launches, overruns=0, memory_bytes_by_kind=kinds)


def why(
    *uses: ContainerUse,
    share: Allocation = SHARE,
    driver: str | None = "580.95.05",
    machine: str = "x86_64",
    host: HostMemory | None = None,
    pods: int = 1,
) -> str | None:
    return obstacle(share, uses or (USE,), driver_version=driver, machine=machine, host=host or HostMemory(), pods=pods)


def test_a_share_can_be_suspended() -> None:
    assert why() is None
    assert why(driver="570.86.10") is None
    assert why(USE, USE, driver="610.1") is None
    assert why(host=HostMemory(node_bytes=5 * GIB, cgroup_bytes=5 * GIB)) is None


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (why(driver="565.57.01"), "version 570 or newer, and this node has 565.57.01"),
        (why(driver=None), "an unknown one"),
        (why(machine="aarch64"), "x86_64 only, and this node has aarch64"),
        (why(share=replace(SHARE, mechanisms=("mps",))), "clients of MPS"),
        (why(share=replace(SHARE, mechanisms=("mps-open",))), "clients of MPS"),
        (why(USE, USE), "2 GPUs, which needs a driver of version 610 or newer"),
        (why(pods=2), "several pods use its claim"),
        (why(replace(USE, turns=turns(1, managed=5))), "managed memory"),
        (why(replace(USE, memory_bytes=None)), "does not report how much memory"),
        (why(host=HostMemory(node_bytes=4 * GIB)), "needs 4556 MiB of the host's memory, and the node has less"),
        (why(host=HostMemory(node_bytes=9 * GIB, cgroup_bytes=GIB)), "its memory limit leaves less: raise the container"),
    ],
)
def test_an_obstacle_has_its_reason(found: str | None, text: str) -> None:
    assert found is not None
    assert text in found


def view(**fields: Any) -> PodView:
    return replace(PodView(namespace="team", name="web", uid="u"), **fields)


def test_the_annotations_decide_before_the_setting() -> None:
    done = Suspension(state="running")
    assert idle_seconds_to_suspend(view(), None, 0.0) is None
    assert idle_seconds_to_suspend(view(), None, 600.0) == 600.0
    assert idle_seconds_to_suspend(view(suspend_when_idle_seconds=90.0), None, 600.0) == 90.0
    assert idle_seconds_to_suspend(view(suspend_when_idle_seconds=0.0), None, 600.0) is None
    assert idle_seconds_to_suspend(view(suspend_when_idle_seconds=1.0), None, 0.0) == AGAIN_SECONDS
    assert idle_seconds_to_suspend(view(), None, 1.0) == AGAIN_SECONDS
    assert idle_seconds_to_suspend(view(suspend=True, suspend_when_idle_seconds=90.0), None, 0.0) == 0.0
    assert idle_seconds_to_suspend(view(suspend=True), done, 0.0) == AGAIN_SECONDS
    assert idle_seconds_to_suspend(view(suspend=False, suspend_when_idle_seconds=90.0), None, 600.0) is None
    assert idle_seconds_to_suspend(view(suspend=True, deleted=True), None, 0.0) is None
    assert idle_seconds_to_suspend(None, None, 600.0) is None


AWAY = Suspension(state="suspended", demanded=True)
RESUMED = Suspension(state="running", demanded=True)
WORKED = Activity(1, 100.0)


def test_a_demand_without_memory_on_the_gpu_is_refused() -> None:
    unused = replace(USE, memory_bytes=0)
    found = next_step(view(suspend=True), None, [unused], WORKED, now=200.0, default_seconds=0.0)
    assert found == (None, "it has no memory on the GPU")


@pytest.mark.parametrize(
    ("fields", "known", "step", "why"),
    [
        ({}, Suspension(state="suspending"), "suspend", None),
        ({"suspend": True}, Suspension(state="resuming"), "resume", None),
        ({"suspend": True}, AWAY, None, None),
        ({}, AWAY, "resume", None),
        ({"suspend": True}, AWAY.asked(5.0), "resume", None),
        ({"suspend": True}, Suspension(state="failed"), None, None),
        ({}, RESUMED, "forget", None),
        ({"suspend": True}, None, "suspend", None),
        ({"suspend_when_idle_seconds": 100.0}, None, "suspend", None),
        ({"suspend_when_idle_seconds": 101.0}, None, None, None),
        ({"suspend_ignored": "no JSON"}, None, None, "no JSON"),
    ],
)
def test_what_is_to_be_done_with_a_container(
    fields: dict[str, Any], known: Suspension | None, step: str | None, why: str | None
) -> None:
    assert next_step(view(**fields), known, [USE], WORKED, now=200.0, default_seconds=0.0) == (step, why)


def test_launches_and_running_kernels_are_work() -> None:
    first = activity(None, [replace(USE, turns=turns(5))], 10.0)
    assert first == Activity(5, 10.0)
    assert activity(first, [replace(USE, turns=turns(5))], 20.0) == Activity(5, 10.0)
    assert activity(first, [replace(USE, turns=turns(6))], 20.0) == Activity(6, 20.0)
    assert activity(first, [replace(USE, turns=turns(5), utilization_ratio=0.1)], 20.0) == Activity(5, 20.0)
    assert activity(first, [replace(USE, turns=turns(5), utilization_ratio=None)], 20.0) == Activity(5, 20.0), "a kernel may run"


def test_resumes_have_the_order_of_demand_on_each_gpu() -> None:
    def away(gpu: str, asked_at: float | None) -> Suspension:
        return Suspension(state="suspended", memory_bytes={gpu: 1}, asked_at=asked_at)

    known = {"b": away("g", 2.0), "a": away("g", 3.0), "c": away("h", 1.0), "d": away("g", None), "e": away("g", 3.0)}
    assert [ahead(known, name) for name in "bace"] == [None, "b", None, "b"]
    del known["b"]
    assert [ahead(known, name) for name in "ae"] == [None, "a"]
    known["f"] = replace(away("h", None), state="suspending")
    assert ahead(known, "c") == "f"


def test_the_reason_names_the_holders_with_most_memory() -> None:
    holders = {"team/a": 5 * MIB, "team/b": 7 * MIB, "team/c": 0}
    assert waits_for(MIB + 1, "g", holders) == "it waits for 2 MiB of GPU g, used by team/b (7 MiB), team/a (5 MiB)"
    assert waits_for(1, "g", {}) == "it waits for 1 MiB of GPU g, used by processes outside of containers"


def test_a_next_state_keeps_the_sizes_and_a_request_its_place() -> None:
    begun = Suspension(state="suspending", memory_bytes={"g": 5})
    done = begun.to("suspended")
    assert (done.away, done.memory_bytes) == (True, {"g": 5})
    assert done.asked(8.0).asked(9.0).asked_at == 8.0
