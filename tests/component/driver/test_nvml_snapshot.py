"""Snapshots through the real binding and the simulated library."""

from pathlib import Path
from typing import Any

import pytest

from gpumgr.common.errors import NvmlAbsent, NvmlError
from gpumgr.driver.binding import NOT_SUPPORTED, DriverMismatchError
from gpumgr.driver.driver import Nvml
from gpumgr.driver.health import Failed
from gpumgr.placement.devices import Level, NodeSnapshot
from gpumgr.sim.library import SimNode

from .conftest import Prepare, give_up_after, opened, until_calls_return

MIB = 1024 * 1024


async def look(prepare_node: Prepare, name: str) -> NodeSnapshot:
    async with opened(prepare_node(name)) as nvml:
        return await nvml.snapshot()


def cells(snapshot: NodeSnapshot) -> list[str]:
    """The matrix as text, row by row: links and levels as `nvidia-smi topo -m` names them."""
    rows = []
    for a in range(len(snapshot.gpus)):
        row = []
        for b in range(len(snapshot.gpus)):
            link = snapshot.topology.link(a, b)
            row.append("X" if a == b else (f"NV{link.nvlinks}+" if link.nvlinks else "") + link.level.name)
        rows.append(" ".join(row))
    return rows


def halves(inner: str, outer: str, size: int) -> list[str]:
    """The matrix of two groups of `size` GPUs."""
    return [
        " ".join("X" if a == b else inner if a // size == b // size else outer for b in range(2 * size)) for a in range(2 * size)
    ]


async def test_hgx_h100_8(node: Prepare) -> None:
    snapshot = await look(node, "hgx-h100-8")
    assert cells(snapshot) == halves("NV18+NODE", "NV18+SYS", 4)
    assert (snapshot.driver_version, snapshot.nvml_version, snapshot.cuda_version) == ("550.90.07", "12.550.90.07", "12.4")
    assert snapshot.failures == ()
    first = snapshot.gpus[0]
    assert (first.index, first.minor, first.bus_id, first.model) == (0, 0, "0000:18:00.0", "NVIDIA H100 80GB HBM3")
    assert (first.memory_bytes, first.memory_blocks, first.mig_enabled) == (81559 * MIB, 318, False)
    assert first.pcie_chain == ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:01.0")
    assert [gpu.numa_node for gpu in snapshot.gpus] == [0] * 4 + [1] * 4
    assert len({gpu.uuid[4:12] for gpu in snapshot.gpus}) == 8


@pytest.mark.parametrize("named", [None, 128 << 30])
async def test_a_gpu_without_memory_information(mixed: SimNode, named: int | None) -> None:
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        mixed.control.set_result(function, NOT_SUPPORTED, gpu=0)
    nvml = Nvml(library_path=mixed.library_path, sysfs_root=mixed.sysfs_root, unreported_memory_bytes=named)
    await nvml.open()
    try:
        snapshot = await nvml.snapshot()
        assert snapshot.failures == ()
        assert [gpu.memory_bytes for gpu in snapshot.gpus] == [named, 15360 * MIB]
        assert [gpu.memory_blocks for gpu in snapshot.gpus] == [512 if named else 0, 60]
        assert not any(isinstance(each, Failed) for each in (await nvml.read(sample=False)).health.values())
        assert (await nvml.read()).sample.gpus[snapshot.gpus[0].uuid].memory_used_bytes is None
    finally:
        await nvml.close()


_P40 = [" ".join("X" if a == b else "PIX" if (a < 3) == (b < 3) else "PHB" for b in range(7)) for a in range(7)]
_DGX1 = [
    "X NV1+PIX NV1+PHB NV2+PHB NV2+SYS SYS SYS SYS",
    "NV1+PIX X NV2+PHB NV1+PHB SYS NV2+SYS SYS SYS",
    "NV1+PHB NV2+PHB X NV2+PIX SYS SYS NV1+SYS SYS",
    "NV2+PHB NV1+PHB NV2+PIX X SYS SYS SYS NV1+SYS",
    "NV2+SYS SYS SYS SYS X NV1+PIX NV1+PHB NV2+PHB",
    "SYS NV2+SYS SYS SYS NV1+PIX X NV2+PHB NV1+PHB",
    "SYS SYS NV1+SYS SYS NV1+PHB NV2+PHB X NV2+PIX",
    "SYS SYS SYS NV1+SYS NV2+PHB NV1+PHB NV2+PIX X",
]


@pytest.mark.parametrize(
    ("name", "matrix", "gpus"),
    [
        ("dgx1-v100-8", _DGX1, {("Tesla V100-SXM2-32GB", 128, None)}),
        ("hgx-16", halves("NV6+NODE", "NV6+SYS", 8), {("Tesla V100-SXM3-32GB", 128, None)}),
        ("pcie-p40-7", _P40, {("Tesla P40", 95, None)}),  # with an old driver
        ("mixed-2", ["X PHB", "PHB X"], {("NVIDIA A100-PCIE-40GB", 160, False), ("Tesla T4", 60, None)}),
    ],
)
async def test_built_in_nodes(
    node: Prepare, name: str, matrix: list[str], gpus: set[tuple[str | None, int, bool | None]]
) -> None:
    snapshot = await look(node, name)
    assert cells(snapshot) == matrix
    assert {(gpu.model, gpu.memory_blocks, gpu.mig_enabled) for gpu in snapshot.gpus} == gpus


async def test_functions_that_a_driver_lacks_leave_unknowns(node: Prepare) -> None:
    sim = node("hgx-h100-8")
    for function in (
        "nvmlSystemGetDriverVersion",
        "nvmlSystemGetNVMLVersion",
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetNumaNodeId",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetNvLinkState",
    ):
        sim.control.set_result(function, 13)
    sim.control.set_result("nvmlDeviceGetMinorNumber", 4)  # no permission
    async with opened(sim) as nvml:
        snapshot = await nvml.snapshot()
    assert snapshot.failures == ()
    assert (snapshot.driver_version, snapshot.nvml_version, snapshot.cuda_version) == (None, None, None)
    gpu = snapshot.gpus[3]
    assert (gpu.minor, gpu.model, gpu.mig_enabled, gpu.bus_id, gpu.numa_node, gpu.pcie_chain) == (
        None,
        None,
        None,
        None,
        None,
        (),
    )
    assert cells(snapshot) == halves("SYS", "SYS", 4)


async def test_nvlinks_without_a_remote_type_are_identified_by_bus_id(node: Prepare) -> None:
    sim = node("dgx1-v100-8")
    sim.control.set_result("nvmlDeviceGetNvLinkRemoteDeviceType", 13)
    async with opened(sim) as nvml:
        assert cells(await nvml.snapshot())[0] == "X NV1+PIX NV1+PHB NV2+PHB NV2+SYS SYS SYS SYS"


async def test_numa_node_from_nvml_where_sysfs_is_hidden(node: Prepare, tmp_path: Path) -> None:
    nvml = Nvml(library_path=node("pcie-a10-4").library_path, sysfs_root=tmp_path / "nothing")
    await nvml.open()
    gpus = (await nvml.snapshot()).gpus
    await nvml.close()
    assert [(gpu.numa_node, gpu.pcie_chain) for gpu in gpus] == [(0, ()), (0, ()), (1, ()), (1, ())]


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetNvLinkState"])
async def test_a_failing_gpu_marks_only_itself(node: Prepare, function: str) -> None:
    sim = node("hgx-h100-8")
    sim.control.set_result(function, 999, gpu=2)
    async with opened(sim) as nvml:
        snapshot = await nvml.snapshot()
    assert [gpu.index for gpu in snapshot.gpus] == [0, 1, 3, 4, 5, 6, 7]
    assert (len(snapshot.topology), snapshot.topology.link(2, 3).level) == (7, Level.SYS)
    assert [(failure.index, "Unknown Error (NVML error 999)" in failure.reason) for failure in snapshot.failures] == [(2, True)]


async def test_a_gpu_lost_after_a_snapshot_keeps_its_uuid(mixed: SimNode, nvml: Nvml) -> None:
    before = await nvml.snapshot()
    mixed.control.lose_gpu(0)
    after = await nvml.snapshot()
    mixed.control.restore_gpu(0)
    assert await nvml.snapshot() == before
    assert [(failure.index, failure.uuid) for failure in after.failures] == [(0, before.gpus[0].uuid)]
    assert [gpu.uuid for gpu in after.gpus] == [before.gpus[1].uuid]


async def test_a_gpu_that_fails_while_pairs_are_read_is_left_out_of_the_matrix(node: Prepare) -> None:
    sim = node("pcie-a10-4")
    sim.control.set_result("nvmlDeviceGetTopologyCommonAncestor", 999, gpu=3)
    async with opened(sim) as nvml:
        unsettled = await nvml.snapshot()
    assert cells(unsettled)[3] == "SYS SYS SYS X"
    assert unsettled.failures == ()


async def test_a_board_of_several_gpus_and_a_driver_that_reports_it_wrongly(node: Prepare, tmp_path: Path) -> None:
    text = """
about: two boards of two GPUs
driver_version: {version}
cuda_version: 9.2
models: {{k80: {{model: Tesla K80, memory_mib: 11441}}}}
gpus:
  - {{model: k80, bus_id: 0000:05:00.0, numa_node: 0, pcie: [pci0000:00, 0000:00:02.0], board: one}}
  - {{model: k80, bus_id: 0000:06:00.0, numa_node: 0, pcie: [pci0000:00, 0000:00:02.0], board: one}}
"""
    found = []
    for version in ("390.157", "396.26"):
        (tmp_path / f"{version}.yaml").write_text(text.format(version=version))
        found.append(cells(await look(node, str(tmp_path / f"{version}.yaml")))[0])
    assert found == ["X PSB", "X PIX"]


async def test_a_library_that_is_not_there() -> None:
    with pytest.raises(NvmlAbsent, match=r"can't be loaded: /nonexistent/libnvidia-ml\.so\.1"):
        await Nvml(library_path="/nonexistent/libnvidia-ml.so.1").open()


async def test_a_machine_without_a_driver(node: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a simulated library was in use in the same process."""
    await look(node, "mixed-2")
    monkeypatch.setattr("pynvml.CDLL", refuse)
    with pytest.raises(NvmlAbsent, match=r"^libnvidia-ml\.so\.1 is not found: the NVIDIA driver is not installed$"):
        await Nvml().open()


def refuse(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


async def test_a_driver_older_than_init_with_flags(mixed: SimNode) -> None:
    mixed.control.set_result("nvmlInitWithFlags", 13)
    async with opened(mixed) as nvml:
        assert len((await nvml.snapshot()).gpus) == 2
    mixed.control.set_result("nvmlInitWithFlags", 13)
    mixed.control.set_result("nvmlInit_v2", 18)
    with pytest.raises(DriverMismatchError):
        await Nvml(library_path=mixed.library_path).open()


async def test_a_driver_that_hangs_in_the_middle_of_a_snapshot(node: Prepare) -> None:
    sim = node("hgx-h100-8")
    async with opened(sim) as nvml:
        before = await nvml.snapshot()
        give_up_after(nvml, 0.2)
        sim.control.hang(function="nvmlSystemGetDriverVersion")
        with pytest.raises(NvmlError, match=r"no answer within 0\.2 s"):
            await nvml.snapshot()
        give_up_after(nvml, 10)
        with pytest.raises(NvmlError, match="gave no answer within"):
            await nvml.read()
        sim.control.release()
        await until_calls_return(nvml)
        assert await nvml.snapshot() == before


async def test_a_gpu_that_begins_to_hang_while_pairs_are_read_takes_one_more_with_it_at_most(
    node: Prepare, monkeypatch: pytest.MonkeyPatch, limits: dict[int | None, float]
) -> None:
    """The thread of GPU1 is in the call about both. The pairs that are not read count as the farthest ones until the next snapshot."""
    sim = node("hgx-16")
    async with opened(sim) as nvml:
        before, read = await nvml.snapshot(), nvml._read_levels

        async def hang_then_read(*arguments: Any) -> dict[frozenset[int], Level]:
            sim.control.hang(gpu=0)
            return await read(*arguments)

        limits |= {0: 0.5, 1: 0.5}
        with monkeypatch.context() as patched:
            patched.setattr(nvml, "_read_levels", hang_then_read)
            hung = await nvml.snapshot()
        assert (hung.gpus, hung.failures) == (before.gpus, ())
        assert {hung.topology.levels[a][b] for a in range(16) for b in range(a)} == {Level.SYS}
        health = (await nvml.read(sample=False)).health
        failed = [uuid for uuid, each in health.items() if isinstance(each, Failed) and each.reason == "hang"]
        assert failed == [before.gpus[n].uuid for n in (0, 1)]
        sim.control.release()
        await until_calls_return(nvml)
        limits.clear()
        assert await nvml.snapshot() == before
