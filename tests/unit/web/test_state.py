"""The document behind the page: the fields of GPUs and containers, and null where a value is unknown."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import gpumgr
from gpumgr.agent.api import Cordon, to_json_data
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.common.units import BLOCK_BYTES
from gpumgr.ledger.gpu_share import GpuLimits
from gpumgr.ledger.history import Candidate, HistoryEntry
from gpumgr.ledger.ids import ALL_CORES, GpuRegistry
from gpumgr.ledger.join import join
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.quarantine import Quarantine
from gpumgr.placement.devices import GpuFailure, GpuProcess, NodeSample
from gpumgr.web.state import HISTORY_SHOWN, node_state
from tests.topologies import topology_from_matrix
from tests.unit.ledger.samples import container
from tests.unit.web.metrics.pictures import BLOCKS, allocation, name_of, sample_of, snapshot_of, uuid_of, view_of, whole

POD = ("team", "web")


def share(letter: str = "a", **about: Any) -> Allocation:
    return replace(allocation(letter, POD, cores={0: 0b111}, blocks={0: 0b11}), **about)


HARD = GpuLimits(memory="hard", memory_by="nvml-memory", cores="soft", cores_by="limiter")


def picture_of(*allocations: Allocation, processes: Mapping[int, GpuProcess] | None = None, **about: Any) -> NodeReport:
    """`processes` by pid on the first GPU: below 100 they are of container a, from 100 on unattributed."""
    view = view_of(*allocations)
    sample = sample_of(0, 1)
    listed = {
        uuid_of(0): replace(sample.gpus[uuid_of(0)], processes=tuple((processes or {}).values())),
        uuid_of(1): sample.gpus[uuid_of(1)],
    }
    sample = NodeSample(gpus=listed)
    owners = {pid: container("a", POD) if pid < 100 else None for pid in processes or ()}
    use = join(view.ledger, sample, owners)
    return replace(
        NodeReport(view=view, node="node-1", at=1000.0, sample=sample, sampled_at=40.0, nvml_up=True, use=use), **about
    )


def document(report: NodeReport, *entries: HistoryEntry) -> dict[str, Any]:
    """As a reader of the JSON has it."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(node_state(report, entries, clock=lambda: 42.5)))
    return found


def process(pid: int, memory_bytes: int | None, ratio: float | None = None) -> GpuProcess:
    return GpuProcess(pid=pid, memory_bytes=memory_bytes, utilization_ratio=ratio)


def test_the_node_and_its_health() -> None:
    api_queue = ApiQueueState(waiting=3, oldest_seconds=1.5, dropped=2, written={("pod", "ok"): 1}, away=True)
    told = document(
        picture_of(
            mode="dra",
            registered={"tencent.com/vcuda-core": True},
            not_ready=("memory is not registered",),
            warnings=("taints are dropped",),
            gpu_limits={uuid_of(n): HARD if n == 0 else GpuLimits() for n in range(2)},
            api_queue=api_queue,
        )
    )
    assert (told["node"], told["at"], told["version"], told["mode"]) == ("node-1", 1000.0, gpumgr.__version__, "dra")
    assert document(picture_of())["mode"] == "plugin"
    assert (told["driver_version"], told["cuda_version"]) == ("550.54.15", "12.4")
    assert (told["ready"], told["not_ready"]) == (False, ["memory is not registered"])
    limits, _, measured = told["limits"].partition("; measured: ")
    assert limits == "GPU 0: memory hard (nvml-memory), cores soft (limiter); GPU 1: memory none, cores none"
    assert "H200" in measured
    assert document(picture_of())["gpus"][0]["limits"] is None
    assert told["health"] == {
        "nvml_up": True,
        "sampled_seconds_ago": 2.5,
        "registered": {"tencent.com/vcuda-core": True},
        "warnings": ["taints are dropped"],
        "api_queue": {"waiting": 3, "dropped": 2, "oldest_seconds": 1.5, "away": True},
    }


def test_a_node_without_a_driver_is_an_empty_document() -> None:
    inventory = Inventory()
    view = AgentView(ledger=Ledger(GpuRegistry()), inventory=inventory, node=inventory.view(GpuRegistry()))
    told = document(NodeReport(view=view))
    assert told["tree"] == {"name": "ROOT", "gpus": [], "children": []}
    assert [told[key] for key in ("nvlinks", "levels", "gpus", "failures", "containers", "history")] == [[], [], [], [], [], []]
    assert (told["ready"], told["driver_version"]) == (True, None)
    assert told["health"] == {"nvml_up": False, "sampled_seconds_ago": None, "registered": {}, "warnings": [], "api_queue": None}


def test_the_topology_as_a_tree_with_links_and_levels() -> None:
    topology = topology_from_matrix([["X", "NV2+PIX", "SYS"], ["NV2+PIX", "X", "SYS"], ["SYS", "SYS", "X"]])
    inventory = Inventory(snapshot=replace(snapshot_of(3), topology=topology))
    gpu_registry = inventory.register(GpuRegistry())
    node = inventory.view(gpu_registry)
    told = document(NodeReport(view=AgentView(ledger=Ledger(gpu_registry), inventory=inventory, node=node)))
    gpus = [{"name": f"GPU{row}", "gpus": [row], "children": []} for row in range(3)]
    switch = {"name": "PIX", "gpus": [0, 1], "children": gpus[:2]}
    socket = {"name": "SYS", "gpus": [0, 1, 2], "children": [switch, gpus[2]]}
    assert told["tree"] == {"name": "ROOT", "gpus": [0, 1, 2], "children": [socket]}
    assert told["nvlinks"] == [{"a": 0, "b": 1, "links": 2}]
    assert told["levels"] == [["X", "PIX", "SYS"], ["PIX", "X", "SYS"], ["SYS", "SYS", "X"]]


def test_rows_are_for_drawing_and_indices_for_names() -> None:
    told = document(NodeReport(view=view_of(count=4, broken=[1])))
    assert [(gpu["row"], gpu["index"]) for gpu in told["gpus"]] == [(0, 0), (None, None), (1, 2), (2, 3)]
    (group,) = told["tree"]["children"]
    assert [(leaf["name"], leaf["gpus"]) for leaf in group["children"]] == [("GPU0", [0]), ("GPU2", [1]), ("GPU3", [2])]
    assert [failure["index"] for failure in told["failures"]] == [1]


def test_a_known_gpu_keeps_its_index_while_it_can_not_be_described() -> None:
    told = document(NodeReport(view=view_of(count=3, broken=[1], named=True)))
    assert [(gpu["row"], gpu["index"]) for gpu in told["gpus"]] == [(0, 0), (None, 1), (1, 2)]
    assert told["failures"] == []


def test_a_gpu_with_all_its_numbers() -> None:
    processes = {7: process(7, 700), 100: process(100, 50), 101: process(101, None)}
    gpu = document(picture_of(share(), processes=processes, gpu_limits={uuid_of(0): HARD}))["gpus"][0]
    assert gpu == {
        "uuid": uuid_of(0),
        "name": name_of(0),
        "row": 0,
        "index": 0,
        "minor": 0,
        "model": "NVIDIA A10",
        "bus_id": "0000:00:00.0",
        "numa_node": 0,
        "memory_bytes": BLOCKS * BLOCK_BYTES + 1,
        "memory_blocks": BLOCKS,
        "cores_free": 97,
        "memory_blocks_free": BLOCKS - 2,
        "healthy": True,
        "reason": None,
        "message": None,
        "cordon": None,
        "memory_used_bytes": 1000,
        "utilization_ratio": 0.25,
        "temperature_celsius": 40.0,
        "power_watts": 71.5,
        "unattributed": {"processes": 2, "memory_bytes": 50},
        "limits": {"memory": "hard", "memory_by": "nvml-memory", "cores": "soft", "cores_by": "limiter"},
        "limits_excess_bytes": 0,
    }


def test_a_gpu_without_a_process_list_has_no_unattributed_processes() -> None:
    assert document(picture_of())["gpus"][1]["unattributed"] == {"processes": None, "memory_bytes": None}


def test_a_gpu_that_is_held_whole_has_no_free_memory() -> None:
    gpu = document(picture_of(whole("b", POD, 1)))["gpus"][1]
    assert (gpu["cores_free"], gpu["memory_blocks_free"]) == (0, 0)


@pytest.mark.parametrize(
    ("view", "reasons", "word", "message"),
    [
        (view_of(failed={uuid_of(0): "XID 79: it has fallen off the bus"}), {uuid_of(0): "xid"}, "xid", "XID 79"),
        (view_of(cordoned={uuid_of(0): "cordoned: a riser"}), {uuid_of(0): "operator"}, "operator", "cordoned: a riser"),
        (view_of(quarantine=Quarantine(held={name_of(0): frozenset({(7, 1)})})), {}, "quarantine", "still run there (pid 7)"),
    ],
)
def test_why_a_gpu_takes_nothing_new(view: AgentView, reasons: Mapping[str, str], word: str, message: str) -> None:
    first, second = document(NodeReport(view=view, reasons=reasons))["gpus"]
    assert (first["healthy"], first["reason"]) == (False, word)
    assert message in first["message"]
    assert (second["healthy"], second["reason"], second["message"]) == (True, None, None)


def test_a_cordon_stands_beside_its_gpu() -> None:
    cordon = Cordon(reason="a riser", since=900.0, draining=True)
    gpus = document(picture_of(cordons={uuid_of(1): cordon}))["gpus"]
    assert [gpu["cordon"] for gpu in gpus] == [None, {"reason": "a riser", "since": 900.0, "draining": True, "evict": False}]


def test_a_gpu_that_the_driver_lost_keeps_its_memory_and_its_holders() -> None:
    told = document(NodeReport(view=view_of(allocation("a", POD, cores={1: 0b11}), whole("b", ("team", "x"), 0), shown=1)))
    gone = told["gpus"][1]
    assert [gone[key] for key in ("row", "index", "minor", "model", "bus_id", "numa_node")] == [None] * 6
    assert (gone["memory_bytes"], gone["reason"]) == (BLOCKS * BLOCK_BYTES, "missing")
    assert [row["gpu"] for row in told["containers"]] == [name_of(1), name_of(0)]


def test_a_gpu_that_was_never_described_is_marked() -> None:
    failures = (
        GpuFailure(index=2, uuid=None, reason="NVML error 15: GPU is lost"),
        GpuFailure(index=0, uuid=uuid_of(0), reason="a GPU, so told with the GPUs"),
    )
    view = view_of()
    inventory = replace(view.inventory, snapshot=replace(view.inventory.snapshot, failures=failures))
    told = document(NodeReport(view=replace(view, inventory=inventory)))
    assert told["failures"] == [{"index": 2, "uuid": None, "message": "NVML error 15: GPU is lost"}]


def test_a_share_with_all_its_numbers() -> None:
    report = picture_of(
        share(mechanisms=("nvml-memory", "limiter")),
        processes={7: process(7, 700, 0.5), 8: process(8, 50, 0.25)},
        over=frozenset({("a", name_of(0))}),
    )
    (row,) = document(report)["containers"]
    assert row == {
        "allocation": "a",
        "namespace": "team",
        "pod": "web",
        "uid": "uid-a",
        "container": "main",
        "init": False,
        "gpu": name_of(0),
        "cores": 3,
        "memory_bytes": 2 * BLOCK_BYTES,
        "whole": False,
        "memory_limit_bytes": None,
        "memory_used_bytes": 750,
        "utilization_ratio": 0.75,
        "processes": 2,
        "held_ratio": None,
        "waited_ratio": None,
        "over": True,
        "suspension": "",
        "suspension_reason": "",
        "mechanisms": ["nvml-memory", "limiter"],
        "granted_at": float(ord("a")),
        "why": "a test",
    }


@pytest.mark.parametrize(("limit", "excess"), [(2, 0), (6, 0), (8, 2), (4, 0)])
def test_a_burst_has_its_limit_and_the_gpu_the_excess_of_all_limits(limit: int, excess: int) -> None:
    """In blocks: the GPU has 8; 2 are granted to the container that may burst, and 2 to another one."""
    report = picture_of(share(), allocation("b", POD, cores={0: 0b1 << 60}, blocks={0: 0b1100}))
    assert report.use is not None
    place = "a", name_of(0)
    use = replace(report.use.containers[place], memory_limit_bytes=limit * BLOCK_BYTES)
    told = document(replace(report, use=replace(report.use, containers={**report.use.containers, place: use})))
    limits = {row["allocation"]: row["memory_limit_bytes"] for row in told["containers"]}
    assert limits == {"a": None if limit == 2 else limit * BLOCK_BYTES, "b": None}
    assert [gpu["limits_excess_bytes"] for gpu in told["gpus"]] == [excess * BLOCK_BYTES, 0]
    assert [gpu["limits_excess_bytes"] for gpu in document(replace(report, nvml_up=False))["gpus"]] == [None, None]


FULL = (100, BLOCKS * BLOCK_BYTES + 1, True)


@pytest.mark.parametrize(
    ("held", "rows"),
    [
        pytest.param({"cores": {0: ALL_CORES, 1: ALL_CORES}}, [FULL, FULL], id="two whole GPUs, each with its own memory"),
        pytest.param(
            {"cores": {0: 0b1}, "blocks": {1: 0b111}}, [(1, 0, False), (0, 3 * BLOCK_BYTES, False)], id="memory elsewhere"
        ),
    ],
)
def test_a_container_has_a_row_on_each_of_its_gpus(held: dict[str, Any], rows: list[object]) -> None:
    found = document(picture_of(allocation("a", POD, **held)))["containers"]
    assert [row["gpu"] for row in found] == [name_of(0), name_of(1)]
    assert [(row["cores"], row["memory_bytes"], row["whole"]) for row in found] == rows


def test_containers_are_listed_oldest_first_with_their_known_names() -> None:
    rows = document(picture_of(allocation("c", None, container=None, cores={0: 0b1000}), share("a", init=True)))["containers"]
    assert [(r["allocation"], r["namespace"], r["pod"], r["container"], r["init"]) for r in rows] == [
        ("a", "team", "web", "main", True),
        ("c", None, None, None, False),
    ]


@pytest.mark.parametrize(
    ("held", "processes", "read"),
    [
        pytest.param(share(), {}, [0, 0.0, 0], id="idle"),
        pytest.param(allocation("a", POD, cores={1: 0b1}), {}, [None, None, None], id="a GPU without a list of processes"),
        pytest.param(share(), {7: process(7, None)}, [None, None, 1], id="a process without numbers"),
    ],
)
def test_unknown_values_of_a_container_are_null_and_idle_is_zero(
    held: Allocation, processes: dict[int, GpuProcess], read: list[object]
) -> None:
    (row,) = document(picture_of(held, processes=processes))["containers"]
    assert [row[key] for key in ("memory_used_bytes", "utilization_ratio", "processes")] == read


def test_values_from_before_the_driver_went_away_are_not_shown() -> None:
    told = document(picture_of(share(), processes={7: process(7, 700)}, nvml_up=False))
    gpu, (row,) = told["gpus"][0], told["containers"]
    assert [gpu[key] for key in ("memory_used_bytes", "utilization_ratio", "temperature_celsius", "power_watts")] == [None] * 4
    assert gpu["unattributed"] == {"processes": None, "memory_bytes": None}
    assert [row[key] for key in ("memory_used_bytes", "utilization_ratio", "processes")] == [None] * 3
    assert told["health"]["sampled_seconds_ago"] == 2.5


def test_the_newest_entries_come_first_and_without_their_candidates() -> None:
    entries = [HistoryEntry(number=n, at=float(n), what="freed") for n in range(1, 99)]
    refused = HistoryEntry(
        number=99,
        at=99.0,
        what="refused",
        id="c",
        pod=POD,
        gpus=(name_of(0),),
        why="no room",
        candidates=(Candidate(gpu=name_of(0)),),
    )
    history = document(picture_of(), *entries, refused)["history"]
    assert [entry["number"] for entry in history] == list(range(99, 99 - HISTORY_SHOWN, -1))
    assert history[0] == {**to_json_data(refused), "candidates": []}
    assert (history[0]["pod"], history[1]["pod"]) == (["team", "web"], None)
