"""The tables of `gpumgr usage`, out of one fixed state: at 80 columns, and where there is room."""

from typing import Any

import pytest

from gpumgr.agent.api import GpuRow, NodeState
from gpumgr.cli.agent_client import decoded, gpu_status
from tests.unit.cli.node_story import AT, GIB, NAMES, container, gpu, state, usage_text

NARROW = """\
gpu-node-1 at 2026-09-21 14:13:20Z, driver 580.65.06

GPU       MODEL     STATE       CORES     BUSY      MEMORY     USED  TEMP  POWER
0         H100      healthy    60/100      41%  10.0/79.5G     7.2G   52C   310W
          80GB
          HBM3
1         H100      draining  100/100      99%  79.5/79.5G    70.0G   64C   655W
          80GB
          HBM3
2b3c4d5e  -         XID         0/100  unknown   0.0/79.5G  unknown     -      -
                    error

GPU0 has processes of no container: 1, with 1.0G
GPU1 is being drained since 2026-09-21 14:12:20Z: new NVLink bridge
GPU 2b3c4d5e takes nothing new: XID 79: the GPU has fallen off the bus

POD (CONTAINER)   GPU  CORES     BUSY  MEMORY     USED  PROCS  LIMITS
team/resnet-0       0     30      38%    5.0G     6.0G      2  over by 1.0G, mps
(main)
pod uid             0     30  unknown    5.0G  unknown      -  not limited
uid-unknown (?)
team/bert (main)    1    100      99%   79.5G    70.0G      1  whole GPU"""

WIDE_CONTAINERS = """\
POD (CONTAINER)          GPU  CORES     BUSY  MEMORY     USED  PROCS  LIMITS
team/resnet-0 (main)       0     30      38%    5.0G     6.0G      2  over by 1.0G, mps
pod uid uid-unknown (?)    0     30  unknown    5.0G  unknown      -  not limited
team/bert (main)           1    100      99%   79.5G    70.0G      1  whole GPU"""

TURNS = """\
POD (CONTAINER)  GPU   HELD  WAITED     BUSY  MEMORY     USED  LIMITS
team/resnet-0      0  24/30     61%      38%    5.0G     6.0G  within,
(main)                                                         nvml-memory,
                                                               limiter
team/new (main)    0   0/30       -  unknown    5.0G  unknown  within, limiter
team/bert          1  -/100       -      99%   79.5G    70.0G  whole GPU
(main)"""


def shown(document: dict[str, Any], width: int | None) -> str:
    return usage_text(decoded(document, NodeState), width=width)


@pytest.mark.parametrize("order", [1, -1])
def test_80_columns_show_everything_that_matters_with_gpus_by_index(order: int) -> None:
    assert shown({**state(), "gpus": state()["gpus"][::order]}, 80) == NARROW


@pytest.mark.parametrize("width", [140, None])
def test_with_room_each_container_has_one_line(width: int | None) -> None:
    assert shown(state(), width).endswith("\n\n" + WIDE_CONTAINERS)


def test_a_container_that_the_limiter_limits_has_its_turns() -> None:
    used = {"utilization_ratio": 0.38, "memory_used_bytes": 6 * GIB, "processes": 2, "mechanisms": ["nvml-memory", "limiter"]}
    rows = [
        container("a", "resnet-0", NAMES[0], held_ratio=0.238, waited_ratio=0.61, **used),
        container("b", "new", NAMES[0], held_ratio=0.0, mechanisms=["limiter"]),
        next(row for row in state()["containers"] if row["pod"] == "bert"),
    ]
    assert shown({**state(), "containers": rows}, 80).endswith("\n\n" + TURNS)


@pytest.mark.parametrize("turns", [{}, {"held_ratio": 1.0, "waited_ratio": 1.0}])
@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_longest_names_fit_any_width_and_are_not_cut(width: int, turns: dict[str, float]) -> None:
    facts = {"container": "q" * 63, "mechanisms": ["nvml-memory", "limiter"], **turns}
    text = shown({**state(), "containers": [container("a", "z" * 253, NAMES[0], **facts)]}, width)
    assert max(map(len, text.splitlines())) <= max(width, 80)
    assert (text.count("z"), text.count("q")) == (253, 63)


def test_containers_stand_by_gpu_then_by_use() -> None:
    rows = [
        container("a", "idle", NAMES[0], utilization_ratio=0.0, memory_used_bytes=GIB),
        container("b", "other", NAMES[1], utilization_ratio=1.0),
        container("c", "fuller", NAMES[0], utilization_ratio=0.0, memory_used_bytes=2 * GIB),
        container("d", "busy", NAMES[0], utilization_ratio=0.5),
        container("e", "unknown", NAMES[0]),
    ]
    text = shown({**state(), "containers": rows}, None)
    pods = [line.split()[0] for line in text.splitlines() if line.startswith("team/")]
    assert pods == ["team/busy", "team/fuller", "team/idle", "team/unknown", "team/other"]


@pytest.mark.parametrize(
    ("mechanisms", "limits"),
    [(["none"], "not limited"), (["mps-open"], "not limited"), (["nvml-memory", "limiter"], "within, nvml-memory, limiter")],
)
def test_the_none_mechanism_is_not_shown_as_enforcement(mechanisms: list[str], limits: str) -> None:
    known = {"utilization_ratio": 0.5, "memory_used_bytes": GIB}
    document = {**state(), "containers": [container("a", "p", NAMES[0], mechanisms=mechanisms, **known)]}
    assert shown(document, None).endswith(f"-  {limits}")


def test_a_burst_shows_request_and_limit_and_the_gpu_by_how_much_limits_exceed_it() -> None:
    facts = {"memory_bytes": 5 * GIB, "memory_limit_bytes": 8 * GIB, "mechanisms": ["limiter"], "memory_used_bytes": 6 * GIB}
    document = {**state(), "containers": [container("a", "p", NAMES[0], **facts)]}
    document["gpus"] = [{**gpu, "limits_excess_bytes": 3 * GIB if gpu["name"] == NAMES[0] else 0} for gpu in document["gpus"]]
    for width in (80, 140):
        text = shown(document, width)
        assert "5.0G..8.0G  6.0G" in text
        assert "within" in text
        assert text.count("the memory limits of the containers on GPU0") == text.count("exceed its memory by 3.0 GiB") == 1
    over = {**facts, "memory_used_bytes": 9 * GIB, "over": True}
    assert "over by 1.0G" in shown({**state(), "containers": [container("a", "p", NAMES[0], **over)]}, 140)


def test_an_empty_node_and_one_that_is_not_ready_have_a_message() -> None:
    lines = shown({**state(), "gpus": [], "containers": [], "not_ready": ["no driver was found yet"]}, 80).splitlines()
    assert (lines[1], lines[-1]) == ("no driver was found yet", "no containers to show")


def test_gpus_that_can_not_be_described_are_named() -> None:
    failed = {**state(), "failures": [{"index": 7, "uuid": None, "message": "the driver says: unknown error"}]}
    assert "GPU7 can't be described: the driver says: unknown error" in shown(failed, None)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "healthy"),
        ({"cordon": {"reason": "", "since": AT, "draining": False}}, "cordoned"),
        ({"healthy": False, "reason": "operator", "cordon": {"reason": "", "since": AT, "draining": True}}, "draining"),
        ({"healthy": False, "reason": "lost", "cordon": {"reason": "", "since": AT, "draining": False}}, "cordoned, lost"),
        ({"healthy": False, "reason": "ecc"}, "ECC errors"),
        ({"healthy": False, "reason": "missing"}, "missing"),
        ({"healthy": False}, "unhealthy"),
        ({"healthy": None}, "-"),
        ({"healthy": None, "cordon": {"reason": "", "since": AT, "draining": False}}, "cordoned"),
    ],
)
def test_health_and_cordon_in_words(facts: dict[str, object], words: str) -> None:
    rows: tuple[GpuRow, ...] = decoded({**state(), "gpus": [gpu(0, NAMES[0], **facts)]}, NodeState).gpus
    assert gpu_status(rows[0]) == words
