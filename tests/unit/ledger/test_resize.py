"""Resize: what a request gets, from whom, and why it is refused. The GPU has 4096 MiB."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.units import Amounts
from gpumgr.ledger.ledger import Allocation, ClaimRequest, Ledger, Resize
from gpumgr.ledger.resize import Surroundings, Waits, decide
from gpumgr.placement.pods import NO_RESIZE, ResizeRequest
from tests.allocations import allocated

from .nodes import ONE as GPU
from .nodes import ledger_of, low

MIB = 1 << 20


def share(name: str, cores: int, blocks: int, **fields: Any) -> Allocation:
    """A container with so many cores and blocks. The first one has the lowest ids, others have the highest."""
    shift = (0, 0) if name == "a" else (100 - cores, 16 - blocks)
    about: dict[str, Any] = {"pod": ("team", name), "uid": f"uid-{name}", "container": "main", "mechanisms": ("limiter",)}
    made = allocated(id=name, cores={GPU: low(cores) << shift[0]}, blocks={GPU: low(blocks) << shift[1]}, **about)
    return replace(made, **fields)


def around(used: Mapping[str, int | None] | None = None, **fields: Any) -> Surroundings:
    """`used`: MiB by container. The settings allow 50 cores and 2048 MiB above a pod's requests."""
    defaults: dict[str, Any] = {
        "used_bytes": {(name, GPU): None if size is None else size * MIB for name, size in (used or {"a": 0}).items()},
        "most_bytes": lambda _allocation, _gpu: 0,
        "memory_mebibytes": {GPU: 4096},
        "most": Amounts(50, 2048),
        "obstacle": lambda _mechanisms, _resource: None,
    }
    return Surroundings(**{**defaults, **fields})


def decided(ledger: Ledger, asked: ResizeRequest, surroundings: Surroundings | None = None) -> Allocation:
    found = decide(ledger, ledger.allocations["a"], asked, surroundings or around())
    assert isinstance(found, Allocation)
    ledger.occupy(found).check()
    return found


def why_not(ledger: Ledger, asked: ResizeRequest, surroundings: Surroundings | None = None) -> str:
    found = decided(ledger, asked, surroundings)
    assert found.resize is not None
    assert found.resize.asked == asked
    assert found.resized == ledger.allocations["a"].resized, "a refusal changes no limit"
    return found.resize.refused


A = share("a", 30, 4)


@pytest.mark.parametrize(
    ("changes", "asked", "why"),
    [
        ({}, ResizeRequest(problem="it is no JSON"), "it is no JSON"),
        ({"claim": ClaimRequest(namespace="n", name="c", uid="u", request="r")}, ResizeRequest(cores=40), "fixed by the API"),
        ({"device_ids": {"mig": {}}, "init": True}, ResizeRequest(cores=40), "an init container can't be resized"),
        ({"gpus": {GPU: Amounts(100, 4096)}}, ResizeRequest(cores=40), "it has whole GPUs"),
        ({"anonymous": True}, ResizeRequest(cores=40), "gpu-manager set its limits"),
        ({"limits": {GPU: Amounts(60, 1024)}}, ResizeRequest(cores=40), "more than once"),
        ({}, ResizeRequest(cores=0), "1 to 99 cores, not 0"),
        ({}, ResizeRequest(cores=100), "1 to 99 cores, not 100"),
        ({}, ResizeRequest(memory_mebibytes=0), "1 MiB of memory or more, not 0"),
    ],
)
def test_what_can_not_be_resized(changes: dict[str, Any], asked: ResizeRequest, why: str) -> None:
    found = decide(ledger_of(A), replace(A, **changes), asked, around())
    assert isinstance(found, Allocation)
    assert found.resize is not None
    assert why in found.resize.refused


def test_growth_comes_from_what_is_free_and_no_new_container_gets_it() -> None:
    found = decided(ledger_of(A), ResizeRequest(cores=50, memory_mebibytes=3000))
    assert (found.limits_on(GPU), found.gpus[GPU]) == (Amounts(50, 3000), Amounts(30, 1024))
    assert ledger_of(A).occupy(found).available(GPU) == Amounts(50, 1096)


def test_the_last_mebibyte_and_one_more() -> None:
    ledger, other = ledger_of(A, share("b", 60, 8)), {"a": 0, "b": 0}
    assert decided(ledger, ResizeRequest(memory_mebibytes=2048), around(other)).limits_on(GPU).memory_mebibytes == 2048
    assert why_not(ledger, ResizeRequest(memory_mebibytes=2049), around(other)) == (
        "GPU 00000000 has 1024 MiB left for it, and it needs 1025 more"
    )
    assert (
        why_not(ledger, ResizeRequest(cores=41), around(other)) == "GPU 00000000 has 10 cores left for it, and it needs 11 more"
    )


def test_a_pod_grows_by_no_more_than_the_settings_allow() -> None:
    for asked, why in (
        (ResizeRequest(cores=81), "51 cores above its requests, and this node allows 50 (enforcement.max_growth_cores)"),
        (
            ResizeRequest(memory_mebibytes=3073),
            "2049 MiB above its requests, and this node allows 2048 (enforcement.max_growth_memory_mebibytes)",
        ),
    ):
        assert why_not(ledger_of(A), asked) == f"the pod would have {why}"
    sibling = replace(share("b", 10, 2), pod=A.pod, uid=A.uid, container="side")
    sibling = replace(sibling, resize=Resize(asked=ResizeRequest(cores=40), amounts={GPU: Amounts(40, 512)}))
    assert "would have 51 cores" in why_not(ledger_of(A, sibling), ResizeRequest(cores=51))
    assert decided(ledger_of(A, sibling), ResizeRequest(cores=50)).limits_on(GPU).cores == 50


@pytest.mark.parametrize(
    ("used", "asked", "why"),
    [
        (None, ResizeRequest(memory_mebibytes=512), "is not known, so it can't get less"),
        (513, ResizeRequest(memory_mebibytes=512), "it uses 513 MiB of GPU 00000000, more than 512 MiB; free memory in it first"),
        (512, ResizeRequest(memory_mebibytes=512), ""),
        (None, ResizeRequest(cores=10), ""),
    ],
)
def test_memory_in_use_is_not_taken_away(used: int | None, asked: ResizeRequest, why: str) -> None:
    found = decided(ledger_of(A), asked, around({"a": used}))
    assert found.resize is not None
    assert why in found.resize.refused if why else not found.resize.refused


def test_only_a_limit_that_changes_must_be_changeable() -> None:
    surroundings = around(obstacle=lambda mechanisms, resource: f"{mechanisms[0]} can't" if resource == "memory" else None)
    assert why_not(ledger_of(A), ResizeRequest(memory_mebibytes=2000), surroundings) == "limiter can't"
    assert decided(ledger_of(A), ResizeRequest(cores=40), surroundings).limits_on(GPU) == Amounts(40, 1024)


@pytest.mark.parametrize("with_init", [False, True])
def test_what_others_may_no_longer_use_is_lent_unless_an_init_container_may_need_it(*, with_init: bool) -> None:
    shrunk = share("b", 60, 12, resize=Resize(asked=NO_RESIZE, amounts={GPU: Amounts(60, 1024)}))
    init = replace(shrunk, id="i", container="prepare", init=True, resize=None)
    ledger = ledger_of(A, *([init] if with_init else []), shrunk)
    found = decided(ledger, ResizeRequest(memory_mebibytes=3072), around({"a": 0, "b": 0}))
    assert found.resize is not None
    assert found.limits_on(GPU).memory_mebibytes == (1024 if with_init else 3072)
    assert bool(found.resize.refused) == with_init


@pytest.mark.parametrize("mechanism", ["limiter", "mps"])
def test_suspended_containers_lend_memory_and_no_client_of_mps_gets_it(mechanism: str) -> None:
    ledger = ledger_of(replace(A, mechanisms=(mechanism,)), share("b", 60, 12))
    found = decided(ledger, ResizeRequest(memory_mebibytes=3000), around({"a": 0, "b": 0}, away={"b"}))
    assert found.resize is not None
    if mechanism == "mps":
        assert "GPU 00000000 has 0 MiB left for it" in found.resize.refused
        return
    assert (found.limits_on(GPU).memory_mebibytes, found.guaranteed_on(GPU).memory_mebibytes) == (3000, 1024)
    assert found.lent_on(GPU) == 1976


def test_growth_waits_while_another_container_may_still_burst_into_it() -> None:
    """Its limit is lower once it is set again."""
    ledger = ledger_of(A, share("b", 60, 8))
    surroundings = around({"a": 0, "b": 2048}, most_bytes=lambda a, _: 3000 * MIB if a.id == "b" else 0)
    found = decide(ledger, ledger.allocations["a"], ResizeRequest(memory_mebibytes=2048), surroundings)
    assert isinstance(found, Waits)
    assert (found.gpu, found.holder.id) == (GPU, "b")
    cores = decide(ledger, ledger.allocations["a"], ResizeRequest(cores=40), surroundings)
    assert isinstance(cores, Allocation)
    assert cores.limits_on(GPU).cores == 40
    held = around({"a": 0, "b": 2050})
    assert "; team/b (main) has 2 MiB above its request there" in why_not(ledger, ResizeRequest(memory_mebibytes=2048), held)


def test_back_to_the_request_and_a_refusal_keep_what_holds() -> None:
    grown = decided(ledger_of(A), ResizeRequest(cores=50))
    ledger = ledger_of(grown)
    assert why_not(ledger, ResizeRequest(cores=99)).startswith("the pod would have 69 cores")
    assert decided(ledger, NO_RESIZE).resized == {}
