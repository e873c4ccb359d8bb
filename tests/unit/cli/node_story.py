"""One node as the agent shows it: two H100 that work, one that fell off the bus, four pods, and what happened to them.

The documents are written out as the contract of the HTTP pages has them, not made by the pages' own functions.
"""

from typing import Any

from gpumgr.agent.api import NodeState
from gpumgr.cli.formats import MIN_WIDTH, UNBOUNDED, plain_text
from gpumgr.cli.usage import usage_tables
from gpumgr.common.units import BLOCK_MEBIBYTES

AT = 1_790_000_000.0
GIB = 1 << 30
BLOCK = 256 << 20
NAMES = ("0fe1c342", "1a2b3c4d", "2b3c4d5e")


def gpu(index: int | None, name: str, **facts: Any) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{name}-0000-0000-0000-000000000000",
        "name": name,
        "row": index,
        "index": index,
        "minor": index,
        "model": "NVIDIA H100 80GB HBM3",
        "bus_id": "0000:01:00.0",
        "numa_node": 0,
        "memory_bytes": 318 * BLOCK,
        "memory_blocks": 318,
        "cores_free": 100,
        "memory_blocks_free": 318,
        "healthy": True,
        "reason": None,
        "message": None,
        "cordon": None,
        "memory_used_bytes": 0,
        "utilization_ratio": 0.0,
        "temperature_celsius": 33,
        "power_watts": 71.4,
        "unattributed": {"processes": 0, "memory_bytes": 0},
    } | facts


def container(allocation: str, pod: str | None, on: str, **facts: Any) -> dict[str, Any]:
    return {
        "allocation": allocation,
        "namespace": "team" if pod else None,
        "pod": pod,
        "uid": f"uid-{pod}" if pod else "uid-unknown",
        "container": "main",
        "init": False,
        "gpu": on,
        "cores": 30,
        "memory_bytes": 5 * GIB,
        "whole": False,
        "memory_used_bytes": None,
        "utilization_ratio": None,
        "processes": None,
        "over": False,
        "mechanisms": ["mps"],
        "granted_at": AT - 600,
        "why": "the least free room that fits: 100 cores and 318 memory blocks were free",
    } | facts


def entry(number: int, what: str, **facts: Any) -> dict[str, Any]:
    return {
        "number": number,
        "at": AT - 1000 + number,
        "what": what,
        "id": None,
        "pod": None,
        "pod_uid": None,
        "container": None,
        "call": None,
        "kind": None,
        "size": 0,
        "gpus": [],
        "evaluator": None,
        "why": "",
        "code": None,
        "mechanisms": [],
        "candidates": [],
    } | facts


def candidate(row: int | None, cores_free: int, memory_blocks_free: int, note: str | None = None) -> dict[str, Any]:
    return {
        "gpu": NAMES[2 if row is None else row],
        "index": row,
        "cores_free": cores_free,
        "memory_blocks_free": memory_blocks_free,
        "memory_mebibytes_free": memory_blocks_free * BLOCK_MEBIBYTES,
        "note": note,
    }


LOST = candidate(None, 100, 318, "XID 79: the GPU has fallen off the bus")
BEST = "the least free room that fits: 70 cores and 298 memory blocks were free"


def entries() -> list[dict[str, Any]]:
    """Oldest first."""
    resnet = {"id": "a1", "pod": ["team", "resnet-0"], "pod_uid": "uid-resnet-0", "container": "main", "gpus": [NAMES[0]]}
    return [
        entry(1, "granted", id="b2", pod=["team", "bert"], pod_uid="uid-bert", container="main", call="allocate", kind="core",
              size=100, gpus=[NAMES[1]], evaluator="fragment",
              why="in the group that is nearly used up: PIX has 1 of the node's 2 free GPUs"),
        entry(2, "gpu", gpus=[NAMES[2]], code="lost", why="XID 79: the GPU has fallen off the bus"),
        entry(3, "granted", **resnet, call="allocate", kind="core", size=30, evaluator="share", why=BEST, mechanisms=["mps"],
              candidates=[candidate(0, 70, 298), candidate(1, 0, 0), LOST]),
        entry(4, "granted", **resnet, call="allocate", kind="memory", size=20, why=BEST, mechanisms=["mps"]),
        entry(5, "refused", id="c3", pod=["team", "odd"], container="main", call="prefer", kind="core", size=60, code="no_fit",
              why="no GPU has 60 cores and 20 memory blocks free; free: GPU0 40 cores and 278 memory blocks",
              candidates=[candidate(0, 40, 278), candidate(1, 0, 0), LOST]),
        entry(6, "event", **resnet, code="OverLimit", why="uses 6.0 GiB on GPU0 and was granted 5.0 GiB"),
        entry(7, "freed", id="d4", pod_uid="uid-gone", container="main", gpus=[NAMES[0]], why="held for 12 s"),
    ]  # fmt: skip


def state() -> dict[str, Any]:
    return {
        "node": "gpu-node-1",
        "at": AT,
        "version": "1",
        "driver_version": "580.65.06",
        "cuda_version": "13.0",
        "ready": True,
        "not_ready": [],
        "enforcement": [{"mechanism": "mps", "keeps": "cores and memory"}],
        "tree": {"name": "ROOT", "gpus": [0, 1], "children": []},
        "nvlinks": [],
        "levels": [["X", "PIX"], ["PIX", "X"]],
        "gpus": [
            gpu(0, NAMES[0], cores_free=40, memory_blocks_free=278, memory_used_bytes=int(7.2 * GIB), utilization_ratio=0.41,
                temperature_celsius=52, power_watts=310.2, unattributed={"processes": 1, "memory_bytes": GIB}),
            gpu(1, NAMES[1], cores_free=0, memory_blocks_free=0, memory_used_bytes=70 * GIB, utilization_ratio=0.99,
                temperature_celsius=64, power_watts=655.0, healthy=False, reason="operator", message="cordoned: new NVLink bridge",
                cordon={"reason": "new NVLink bridge", "since": AT - 60, "draining": True}),
            gpu(None, NAMES[2], healthy=False, reason="xid", message="XID 79: the GPU has fallen off the bus",
                model=None, memory_used_bytes=None, utilization_ratio=None, temperature_celsius=None, power_watts=None),
        ],
        "failures": [],
        "containers": [
            container("b2", "bert", NAMES[1], cores=100, memory_bytes=318 * BLOCK, whole=True, mechanisms=[],
                      memory_used_bytes=70 * GIB, utilization_ratio=0.99, processes=1),
            container("e5", None, NAMES[0], mechanisms=[], container=None),
            container("a1", "resnet-0", NAMES[0], memory_used_bytes=6 * GIB, utilization_ratio=0.38, processes=2, over=True),
        ],
        "history": [{key: told[key] for key in told if key != "candidates"} for told in reversed(entries())],
        "health": {"nvml_up": True, "sampled_seconds_ago": 0.4, "registered": {}, "api_queue": None},
    }  # fmt: skip


def story() -> dict[str, Any]:
    """The story of team/resnet-0."""
    return {
        "namespace": "team",
        "pod": "resnet-0",
        "uid": "uid-resnet-0",
        "phase": "Running",
        "reason": None,
        "message": None,
        "request": [
            {"container": "setup", "kind": "init", "cores": 10, "memory_blocks": 1},
            {"container": "main", "kind": "app", "cores": 30, "memory_blocks": 20},
        ],
        "allocations": [row for row in state()["containers"] if row["pod"] == "resnet-0"],
        "gpus": [row for row in state()["gpus"] if row["name"] == NAMES[0]],
        "history": [told for told in entries() if told["pod"] == ["team", "resnet-0"]],
    }


def usage_text(shown: NodeState, *, width: int | None) -> str:
    """The tables of `gpumgr usage` as plain text; `width` None: without a terminal."""
    width = UNBOUNDED if width is None else max(width, MIN_WIDTH)
    return plain_text(usage_tables(shown), width=width)
