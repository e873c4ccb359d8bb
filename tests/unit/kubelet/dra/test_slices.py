"""The content of the ResourceSlice, and what the API server drops of it."""

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr.cli.examination.api_server import differences
from gpumgr.kube.pods import parse_quantity
from gpumgr.kubelet.slices import (
    LOST_TAINT,
    SliceDevice,
    Taint,
    dropped,
    offered,
    probe_slice,
    resource_slice,
    semantic_version,
    slice_devices,
    slice_name,
    with_lost,
)
from gpumgr.placement.devices import Gpu, NodeSnapshot
from tests.topologies import topology_from_matrix

SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
SICK = Taint(key="gpu.gpumgr.io/xid")


def gpu(index: int, **more: Any) -> Gpu:
    common: dict[str, Any] = {
        "minor": index,
        "bus_id": f"0000:{index + 23:02x}:00.0",
        "model": "NVIDIA A100-SXM4-80GB",
        "memory_bytes": 81664 << 20,
        "numa_node": index // 4,
        "pcie_chain": ("pci0000:16", "0000:16:01.0"),
    }
    return Gpu(index=index, uuid=f"GPU-{index:08x}", **{**common, **more})


def snapshot(rows: list[str], **more: Any) -> NodeSnapshot:
    """`rows`: the cells of the link matrix, by row."""
    gpus = tuple(gpu(index, **more) for index in range(len(rows)))
    return NodeSnapshot(gpus=gpus, topology=topology_from_matrix([row.split() for row in rows]), driver_version="580.95.05")


def published(node: NodeSnapshot, **taints: tuple[Taint, ...]) -> tuple[SliceDevice, ...]:
    return slice_devices(node, {each.uuid: each.uuid[4:] for each in node.gpus}, enforcement="mps", taints=taints)


def device(**more: Any) -> SliceDevice:
    """`more`: of the device, or of its GPU."""
    own = {key: value for key, value in more.items() if key in ("name", "taints", "shared")}
    (made,) = published(snapshot(["X"], **{key: value for key, value in more.items() if key not in own}))
    return replace(made, **own)


def grid(size: int, near: dict[tuple[int, int], str], rest: str) -> list[str]:
    cells = {**near, **{(b, a): cell for (a, b), cell in near.items()}}
    return [" ".join("X" if a == b else cells.get((a, b), rest) for b in range(size)) for a in range(size)]


# -- content -----------------------------------------------------------------------------------------------------------------


def test_one_gpu() -> None:
    made = resource_slice("node-7", "u-1", published(snapshot(["X"]), **{"00000000": (SICK,)}))
    assert made["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "node-7", "uid": "u-1", "controller": True}
    ]
    (only,) = made["spec"].pop("devices")
    assert made["spec"] == {
        "driver": "gpu.gpumgr.io",
        "nodeName": "node-7",
        "pool": {"name": "node-7", "generation": 1, "resourceSliceCount": 1},
    }
    assert only == {
        "name": "gpu-00000000",
        "allowMultipleAllocations": True,
        "attributes": {
            "type": {"string": "gpu"},
            "uuid": {"string": "GPU-00000000"},
            "productName": {"string": "NVIDIA A100-SXM4-80GB"},
            "architecture": {"string": "Ampere"},
            "island": {"string": "nvlink-0"},
            "pair": {"string": "pair-0"},
            "enforcement": {"string": "mps"},
            "index": {"int": 0},
            "cudaComputeCapability": {"version": "8.0.0"},
            "driverVersion": {"version": "580.95.5"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:17:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:16"},
            "resource.kubernetes.io/numaNode": {"int": 0},
        },
        "capacity": {
            "cores": {"value": "100", "requestPolicy": {"default": "100", "validRange": {"min": "1", "max": "100", "step": "1"}}},
            "memory": {
                "value": "81664Mi",
                "requestPolicy": {"default": "81664Mi", "validRange": {"min": "256Mi", "max": "81664Mi", "step": "256Mi"}},
            },
        },
        "taints": [{"key": "gpu.gpumgr.io/xid", "effect": "NoSchedule"}],
    }


def test_without_share_mode_a_gpu_has_no_request_policies() -> None:
    (only,) = resource_slice("n", "u", [device(shared=False)])["spec"]["devices"]
    assert "allowMultipleAllocations" not in only
    assert only["capacity"] == {"cores": {"value": "100"}, "memory": {"value": "81664Mi"}}
    sent = resource_slice("n", "u", [device(shared=False)])
    assert dropped(sent, as_stored(sent)) is None


def test_what_is_unknown_has_a_value_or_is_left_out() -> None:
    bare = replace(snapshot(["X"], model=None, bus_id=None, numa_node=None, pcie_chain=()), driver_version=None)
    (only,) = resource_slice("n", "u", published(bare))["spec"]["devices"]
    full = resource_slice("n", "u", [device()])["spec"]["devices"][0]["attributes"]
    assert [name for name in full if "/" not in name] == list(only["attributes"])
    assert only["attributes"]["cudaComputeCapability"] == {"version": "0.0.0"}
    assert only["attributes"]["driverVersion"] == {"version": "0.0.0"}
    assert "taints" not in only


def test_a_gpu_without_two_blocks_or_a_name_is_left_out() -> None:
    node = snapshot(grid(3, {}, "PIX"))
    gpus = (replace(node.gpus[0], memory_bytes=511 << 20), *node.gpus[1:])
    names = {each.uuid: each.uuid[4:] for each in gpus[:2]}
    made = slice_devices(replace(node, gpus=gpus), names, enforcement="", taints={})
    assert [each.name for each in made] == ["gpu-00000001"]


def test_a_gpu_without_memory_information_is_published_without_and_is_not_shared() -> None:
    node = snapshot(grid(2, {}, "PIX"))
    node = replace(node, gpus=(replace(node.gpus[0], memory_bytes=None), node.gpus[1]))
    alone, other = resource_slice("n", "u", published(node))["spec"]["devices"]
    assert (alone["capacity"], "allowMultipleAllocations" in alone) == ({"cores": {"value": "100"}}, False)
    assert (other["capacity"].keys(), other["allowMultipleAllocations"]) == ({"cores", "memory"}, True)
    assert differences({"GPU-00000000": None, "GPU-00000001": 319}, [alone, other]) == ()
    assert differences({"GPU-00000000": None}, []) == ("GPU-00000000 is not published",)
    assert differences({"GPU-00000000": 16}, [alone]) == ("GPU-00000000 has no blocks of memory in place of 16",)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("580.95.05", "580.95.5"),
        ("535.104", "535.104.0"),
        ("470", "470.0.0"),
        ("1.2.3.4", "1.2.3"),
        ("550.54.14-rc1", "0.0.0"),
        ("٣.1.1", "0.0.0"),
        ("1..2", "0.0.0"),
        (f"{'9' * 99}.1.1", "0.0.0"),
        ("", "0.0.0"),
        (None, "0.0.0"),
    ],
)
def test_versions_are_strict(text: str | None, version: str) -> None:
    assert semantic_version(text) == version
    assert SEMVER.fullmatch(version)


@pytest.mark.parametrize(("text", "kept"), [("x" * 70, "x" * 64), ("x" * 63 + "é", "x" * 63), ("é" * 40, "é" * 32)])
def test_texts_are_cut_to_64_bytes(text: str, kept: str) -> None:
    (made,) = resource_slice("n", "u", [device(model=text)])["spec"]["devices"]
    assert made["attributes"]["productName"] == {"string": kept}


@given(st.integers(512, 1 << 21))
def test_memory_is_a_multiple_of_the_step(mebibytes: int) -> None:
    (made,) = resource_slice("n", "u", [device(memory_bytes=mebibytes << 20)])["spec"]["devices"]
    memory = made["capacity"]["memory"]
    policy = memory["requestPolicy"]
    assert memory["value"] == policy["default"] == policy["validRange"]["max"]
    value = int(memory["value"].removesuffix("Mi"))
    assert value % 256 == 0
    assert 0 <= mebibytes - value < 256


@pytest.mark.parametrize("node", ["n", "x" * 253])
def test_the_name_is_fixed_and_short_enough(node: str) -> None:
    name = slice_name(node)
    assert name.startswith("00000-gpu.gpumgr.io-")
    assert len(name) <= len(probe_slice(node)["metadata"]["name"]) <= 253
    assert name != slice_name(node[:-1] + "y")
    assert resource_slice(node, "u", [])["metadata"]["name"] == name


# -- order and NVLink --------------------------------------------------------------------------------------------------------

#: Two PCIe switches with two GPUs each; NVLink across the switches.
CROSSED = grid(4, {(0, 1): "PIX", (2, 3): "PIX", (0, 2): "NV2+NODE", (1, 3): "NV2+NODE"}, "NODE")
#: DGX-1: two quads with NVLink, and links between the quads.
DGX1 = grid(
    8,
    {
        **{(a, a + 1): "NV1+PIX" for a in (0, 2, 4, 6)},
        (0, 3): "NV2+NODE",
        (1, 2): "NV2+NODE",
        (4, 7): "NV2+NODE",
        (5, 6): "NV2+NODE",
        (0, 4): "NV2",
        (1, 5): "NV1",
        (2, 6): "NV1",
        (3, 7): "NV1",
    },
    "SYS",
)


@pytest.mark.parametrize(
    ("rows", "order", "islands", "pairs"),
    [
        (grid(2, {}, "SYS"), [0, 1], [[0], [1]], [[0], [1]]),
        (grid(2, {}, "NODE"), [0, 1], [[0], [1]], [[0, 1]]),
        (grid(3, {(0, 1): "NODE", (0, 2): "PIX", (1, 2): "NODE"}, ""), [1, 0, 2], [[0], [1], [2]], [[0, 2], [1]]),
        (grid(4, {}, "NV12+SYS"), [0, 1, 2, 3], [[0, 1, 2, 3]], [[0, 1], [2, 3]]),
        (CROSSED, [0, 1, 2, 3], [[0, 2], [1, 3]], [[0, 2], [1, 3]]),
        (DGX1, [0, 1, 2, 3, 4, 5, 6, 7], [[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 3], [1, 2], [4, 7], [5, 6]]),
        # Three GPUs on one socket, one on the other: the lone one is used up first.
        (grid(4, {(0, 1): "PIX", (0, 2): "PIX", (1, 2): "PIX"}, "SYS"), [3, 0, 1, 2], [[0], [1], [2], [3]], [[0, 1], [2], [3]]),
    ],
)
def test_order_islands_and_pairs(rows: list[str], order: list[int], islands: list[list[int]], pairs: list[list[int]]) -> None:
    devices = published(snapshot(rows))
    assert [each.gpu.index for each in devices] == order

    def groups(attribute: str) -> list[list[int]]:
        values = {getattr(each, attribute) for each in devices}
        return sorted(sorted(each.gpu.index for each in devices if getattr(each, attribute) == value) for value in values)

    assert groups("island") == islands
    assert groups("pair") == pairs


@st.composite
def matrices(draw: st.DrawFn) -> list[str]:
    size = draw(st.integers(1, 8))
    cell = st.sampled_from(["SYS", "NODE", "PHB", "PIX", "PSB", "NV1+SYS", "NV2+PIX", "NV12"])
    return grid(size, {(a, b): draw(cell) for b in range(size) for a in range(b)}, "")


@given(matrices())
def test_any_topology_gives_a_slice_with_each_gpu_once(rows: list[str]) -> None:
    node = snapshot(rows)
    devices = published(node)
    assert sorted(each.gpu.index for each in devices) == list(range(len(rows)))
    assert max(Counter(each.pair for each in devices).values()) <= 2
    for a in devices:
        for b in devices:
            if a.gpu.index != b.gpu.index and node.topology.nvlinks[a.gpu.index][b.gpu.index]:
                assert a.island == b.island


# -- lost GPUs ---------------------------------------------------------------------------------------------------------------


def test_a_lost_gpu_stays_in_its_place_with_a_taint_until_it_is_back() -> None:
    before = published(snapshot(grid(3, {}, "PIX")), **{"00000001": (SICK,)})
    now = (before[2], before[0])
    after = with_lost(before, now)
    lost = Taint(key=LOST_TAINT)
    assert [(each.gpu.index, each.taints) for each in after] == [(0, ()), (1, (SICK, lost)), (2, ())]
    assert with_lost(after, now) == after
    assert with_lost(after, before) == before
    added = replace(before[0], name="gpu-new", gpu=gpu(9))
    assert [each.gpu.index for each in with_lost(before, (added, *now))] == [0, 1, 2, 9]


# -- the API server --------------------------------------------------------------------------------------------------------------


def as_stored(sent: Any) -> Any:
    """As the API server answers it: quantities spelled anew, taints dated, metadata added."""
    stored = json.loads(json.dumps(sent).replace('"81664Mi"', '"83623936Ki"').replace('"256Mi"', '"0.25Gi"'))
    stored["metadata"] |= {"uid": "s-1", "resourceVersion": "5", "generation": 1}
    for each in stored["spec"]["devices"]:
        for taint in each.get("taints", []):
            taint["timeAdded"] = "2026-11-01T10:00:00Z"
    stored["spec"]["perDeviceNodeSelection"] = None
    return stored


def test_the_probe_has_a_range_that_the_api_server_accepts() -> None:
    """validRange: the minimum and one step within the value (validateRequestPolicyRange of Kubernetes)."""
    (made,) = probe_slice("n")["spec"]["devices"]
    for capacity in made["capacity"].values():
        low, step, value = (
            parse_quantity(text)
            for text in (*(capacity["requestPolicy"]["validRange"][key] for key in ("min", "step")), capacity["value"])
        )
        assert low + step <= value


SENT = resource_slice("n", "u", [device(taints=(SICK,)), device(name="gpu-2")])


# -- feature gates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "gate", "sharing"),
    [
        ((), None, False),
        (("allowMultipleAllocations",), "DRAConsumableCapacity", True),
        (("requestPolicy",), "DRAConsumableCapacity", True),
        (("taints",), "DRADeviceTaints", False),
        (("taints", "requestPolicy"), "DRAConsumableCapacity", True),
    ],
)
@pytest.mark.parametrize("sent", [SENT, probe_slice("n")])
def test_dropped_fields_name_their_gate(sent: Any, lost: tuple[str, ...], gate: str | None, sharing: bool) -> None:
    stored = as_stored(sent)
    for each in stored["spec"]["devices"]:
        for name in lost:
            for holder in (each, *each["capacity"].values()):
                holder.pop(name, None)
    loss = dropped(sent, stored)
    assert (loss is None) == (gate is None)
    devices = [device(), device(name="gpu-2", taints=(SICK,))]
    if loss is None:
        assert offered(devices, loss) == tuple(devices)
        return
    assert (loss.sharing, offered(devices, loss)) == (sharing, () if sharing else (devices[0],))
    assert f"the feature gate {gate} is off" in loss.sentence
    assert "Kubernetes 1.36" in loss.sentence
