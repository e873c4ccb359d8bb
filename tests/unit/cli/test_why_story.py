"""The description of a pod, from fixed documents, and the accepted names of pods."""

from typing import Any, get_args

import pytest
from click import BadParameter

from gpumgr.agent.api import NodeState, PodDetails
from gpumgr.cli.agent_client import decoded, gpus_of
from gpumgr.cli.options import PodName
from gpumgr.cli.why import CALLS, pod_text
from gpumgr.ledger.history import Call
from tests.unit.cli.node_story import AT, GIB, NAMES, candidate, container, entries, entry, gpu, state, story

GRANTED = """\
Pod team/resnet-0, uid uid-resnet-0, Running.

It requests:
  setup (init container): 10 cores and 1 memory block (0.25 GiB)
  main: 30 cores and 20 memory blocks (5 GiB)

What happened:
  2026-09-21 13:56:43Z  granted 30 cores and 20 memory blocks (5 GiB) to main
    GPU           cores free  blocks free  chosen, or why not
    0 (0fe1c342)          70          298  chosen
    1 (1a2b3c4d)           0            0  too few cores
    - (2b3c4d5e)         100          318  XID 79: the GPU has fallen off the bus
    chosen: GPU0, by share: the least free room that fits: 70 cores and 298 memory blocks were free
    allocation a1, kept within its share by mps
  2026-09-21 13:56:46Z  event OverLimit
    GPU0: uses 6.0 GiB on GPU0 and was granted 5.0 GiB

It holds:
  main has 30 cores and 5.0 GiB of GPU0 since 2026-09-21 14:03:20Z (allocation a1)
    why: the least free room that fits: 100 cores and 318 memory blocks were free
    kept within its share by mps
    now: busy 38% of the time, uses 6.0 GiB, 2 processes, over its memory"""

REFUSED = """\
Pod team/odd.

Its request is not known: the agent does not respond. The decisions below show what the kubelet requested.

What happened:
  2026-09-21 13:56:45Z  refused 60 cores for main in GetPreferredAllocation
    GPU           cores free  blocks free  chosen, or why not
    0 (0fe1c342)          40          278  too few cores
    1 (1a2b3c4d)           0            0  too few cores
    - (2b3c4d5e)         100          318  XID 79: the GPU has fallen off the bus
    refused as no_fit: no GPU has 60 cores and 20 memory blocks free; free: GPU0 40 cores and 278 memory blocks
    allocation c3

It held no GPU of this node when the checkpoint was written."""


def told(document: dict[str, Any], *, live: bool = True) -> str:
    return pod_text(decoded(document, PodDetails), gpus_of(decoded(state(), NodeState).gpus), live=live)


def of(pod: str, *history: dict[str, Any], **facts: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"uid": None, "phase": None, "request": [], "allocations": []}
    return {"namespace": "team", "pod": pod, "history": list(history), **empty, **facts}


def verdicts(text: str) -> list[str]:
    return [
        line.split(maxsplit=4)[4] if len(line.split()) > 4 else "" for line in text.splitlines() if line.startswith("    0 (")
    ]


def test_a_granted_pod() -> None:
    assert told(story()) == GRANTED


def test_a_refused_pod_out_of_the_checkpoint() -> None:
    assert told(of("odd", entries()[4]), live=False) == REFUSED


def test_without_the_agent_use_is_not_known() -> None:
    text = told(story(), live=False)
    assert text.endswith("\n    kept within its share by mps\nWhat it uses now is not known: the agent does not respond.")
    assert "busy" not in text


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"held_ratio": 0.248, "waited_ratio": 0.41}, "now: held the GPU 25% of the time, waited 41% of the time for its turn"),
        ({"held_ratio": 0.0, "waited_ratio": 0.0}, "now: held the GPU 0% of the time, waited 0% of the time for its turn"),
        ({}, "what it uses is not known"),
    ],
)
def test_turns_of_the_limiter_are_part_of_what_it_uses(facts: dict[str, float], sentence: str) -> None:
    allocation = container("a", "p", NAMES[0], mechanisms=["limiter"], **facts)
    assert told(of("p", allocations=[allocation], gpus=[])).endswith(f"\n    {sentence}")


@pytest.mark.parametrize(
    ("cores", "blocks", "free", "verdict"),
    [
        (60, 20, (40, 278), "too few cores"),
        (60, 20, (60, 19), "too few blocks"),
        (60, 20, (60, 20), ""),
        (200, 0, (99, 318), "not entirely free"),
        (200, 900, (100, 318), ""),
    ],
)
def test_why_a_gpu_was_not_chosen_goes_by_the_pods_request(cores: int, blocks: int, free: tuple[int, int], verdict: str) -> None:
    decision = {"container": "main", "call": "prefer", "kind": "core", "size": cores, "code": "no_fit"}
    refused = entry(1, "refused", **decision, candidates=[candidate(0, *free)])
    request = [{"container": "main", "kind": "app", "cores": cores, "memory_blocks": blocks}]
    assert verdicts(told(of("p", refused, request=request))) == [verdict]


def test_a_gpu_that_had_room_too_is_said_to_have_had_it() -> None:
    both = {"id": "a", "container": "main", "call": "prefer", "gpus": [NAMES[1]]}
    first = entry(1, "granted", **both, kind="core", size=30, candidates=[candidate(0, 90, 90), candidate(1, 70, 70)])
    second = entry(2, "granted", **both, kind="memory", size=20)
    assert verdicts(told(of("p", first, second))) == ["fits, was not chosen"]


def test_both_calls_of_an_allocation_are_one_decision_with_the_first_gpu_table() -> None:
    main = {"id": "a", "container": "main", "call": "allocate", "gpus": [NAMES[0]], "why": "the best", "mechanisms": ["mps"]}
    first = entry(1, "granted", **main, kind="memory", size=20, evaluator="share", candidates=[candidate(0, 100, 318)])
    second = entry(2, "granted", **main, kind="core", size=30, candidates=[candidate(0, 100, 298)])
    text = told(of("p", first, second))
    assert "13:56:41Z  granted 30 cores and 20 memory blocks (5 GiB) to main\n" in text
    assert "chosen: GPU0, by share: the best\n    allocation a, kept within its share by mps\n" in text
    assert (text.count("granted"), text.count("cores free"), text.count("allocation a")) == (1, 1, 1)
    assert verdicts(text) == ["chosen"]
    assert "0 (0fe1c342)         100          318  chosen" in text


@pytest.mark.parametrize(
    ("what", "id", "kind", "title"),
    [
        ("granted", "b", "memory", "granted 1 memory block (0.25 GiB) to main"),
        ("granted", "a", "core", "granted 1 core to main"),
        ("refused", "a", "memory", "refused 1 memory block (0.25 GiB) for main in Allocate"),
    ],
)
def test_other_decisions_are_shown_one_by_one(what: str, id: str, kind: str, title: str) -> None:
    main = {"container": "main", "call": "allocate"}
    both = entry(1, "granted", id="a", kind="core", size=30, **main), entry(2, what, id=id, kind=kind, size=1, **main)
    lines = told(of("p", *both)).splitlines()
    shown = [line.partition("Z  ")[2] for line in lines if line.startswith("  2026")]
    assert shown == ["granted 30 cores to main", title]


@pytest.mark.parametrize("call", get_args(Call))
def test_a_refusal_names_the_kubelets_call(call: Call) -> None:
    refused = entry(1, "refused", id="a", call=call, code="conflict", why="two limits")
    assert f"refused in {CALLS[call]}\n    refused as conflict: two limits\n" in told(of("p", refused))


def test_the_reason_of_a_placement_is_shown_once_for_all_gpus_also_without_its_decision() -> None:
    rows = [container("a", "p", NAMES[n], why="the nearest two") for n in (0, 1)] + [container("b", "p", NAMES[0], why="")]
    text = told(of("p", allocations=rows))
    assert "The history has nothing about it." in text
    assert (text.count("    why: the nearest two\n"), text.count("why:")) == (1, 1)


@pytest.mark.parametrize(
    ("mechanisms", "sentence"),
    [
        ([], "nothing keeps it within its share"),
        (["none"], "nothing keeps it within its share"),
        (["mps-open"], "nothing keeps it within its share (mps-open: it is exempt)"),
        (["nvml-memory", "limiter"], "kept within its share by nvml-memory and limiter"),
    ],
)
def test_the_none_mechanism_is_not_shown_as_a_limit(mechanisms: list[str], sentence: str) -> None:
    granted = entry(1, "granted", id="a", call="allocate", kind="core", size=30, gpus=[NAMES[0]], mechanisms=mechanisms)
    text = told(of("p", granted, allocations=[container("a", "p", NAMES[0], mechanisms=mechanisms)]))
    assert f"\n    {sentence}\n" in text
    assert f"    allocation a{f', {sentence}' if mechanisms else ''}\n" in text


def test_pods_of_one_name_are_shown_separately() -> None:
    text = told(of("p", entry(1, "freed", pod_uid="old", why="held for 3 s"), uid="new"))
    assert "not known: the API server does not have the pod." in text
    assert text.startswith("Pod team/p, uid new.\n")
    assert "freed, uid old\n    held for 3 s" in text


def test_whole_gpus_and_shares_that_nothing_keeps() -> None:
    rows = [
        container("a", "p", NAMES[1], cores=100, whole=True, mechanisms=[], container="train"),
        container("b", "p", NAMES[0], mechanisms=[], init=True, memory_used_bytes=GIB, processes=1),
    ]
    text = told(of("p", allocations=rows))
    assert "  train has GPU1 whole since" in text
    assert "    no limits: it has the whole GPU\n    what it uses is not known" in text
    assert "  main (init container) has 30 cores and 5.0 GiB of GPU0 since" in text
    assert "    nothing keeps it within its share\n    now: uses 1.0 GiB, 1 process" in text


def test_a_burst_has_its_request_its_limit_and_its_use() -> None:
    row = container("a", "p", NAMES[0], memory_limit_bytes=8 * GIB, memory_used_bytes=6 * GIB)
    text = told(of("p", allocations=[row]))
    assert "30 cores and 5.0 GiB (and up to 8.0 GiB while no container is granted the rest) of GPU0 since" in text
    assert "now: uses 6.0 GiB" in text


def test_the_kubelets_message_for_a_refused_pod_is_shown() -> None:
    status = {"reason": "UnexpectedAdmissionError", "message": "Allocate failed due to Requested: 400, Available: 158\x1b"}
    text = told(of("big3", phase="Failed", **status))
    said = "UnexpectedAdmissionError: Allocate failed due to Requested: 400, Available: 158\\x1b"
    assert text.startswith(f"Pod team/big3, Failed.\nIts status: {said}\n\n")
    assert told(of("big3", message="no node")).startswith("Pod team/big3.\nIts status: no node\n\n")


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ({}, "event\n    no details"),
        ({"code": "OverLimit", "why": "uses 6.0 GiB"}, "event OverLimit\n    uses 6.0 GiB"),
        ({"gpus": [NAMES[0]]}, "event\n    GPU0"),
    ],
)
def test_an_event_has_its_gpus_and_its_reason_if_they_are_known(facts: dict[str, Any], lines: str) -> None:
    assert f"Z  {lines}\n" in told(of("p", entry(1, "event", **facts)))


def test_health_events_of_a_pods_gpus_are_shown_with_its_events_and_its_gpus() -> None:
    lost = entry(8, "gpu", gpus=[NAMES[0]], code="lost", why="XID 79: the GPU has fallen off the bus")
    rows = [container("a", "p", NAMES[0]), container("b", "p", NAMES[0], container="side"), container("c", "p", NAMES[1])]
    cordon = {"reason": "new NVLink bridge", "since": AT - 60, "draining": False}
    gpus = [
        gpu(0, NAMES[0], healthy=False, reason="lost", message=lost["why"]),
        gpu(1, NAMES[1], healthy=False, reason="operator", message="cordoned by the operator", cordon=cordon),
    ]
    text = told(of("p", lost, allocations=rows, gpus=gpus))
    assert "  2026-09-21 13:56:48Z  gpu lost\n    GPU0: XID 79: the GPU has fallen off the bus\n" in text
    seats = text.partition("It holds:\n")[2]
    new = "    GPU0 takes nothing new: XID 79: the GPU has fallen off the bus\n"
    assert f"    kept within its share by mps\n{new}    what it uses" in seats
    assert "    GPU1 is cordoned since 2026-09-21 14:12:20Z: new NVLink bridge\n" in seats
    assert (seats.count("takes nothing new"), seats.count("cordoned")) == (1, 1)


def test_a_pod_without_events() -> None:
    text = told(of("p", request=[{"container": "side", "kind": "sidecar", "cores": 1, "memory_blocks": 0}], phase="Pending"))
    assert "Pod team/p, Pending." in text
    assert "  side (sidecar): 1 core\n" in text
    assert "The history has nothing about it." in text
    assert text.endswith("It holds no GPU of this node.")


@pytest.mark.parametrize("text", ["", "/", "/x", "x/", "a/b/c"])
def test_what_names_no_pod_is_refused(text: str) -> None:
    with pytest.raises(BadParameter, match="is not a pod's name: expected NAME or NAMESPACE/NAME"):
        PodName().convert(text, None, None)


def test_a_name_alone_is_a_pod_of_the_default_namespace() -> None:
    assert [PodName().convert(text, None, None) for text in ("one", "c/one")] == [("default", "one"), ("c", "one")]
