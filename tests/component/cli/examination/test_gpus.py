"""Driver, NVML and device nodes, on simulated nodes and in temporary folders."""

from pathlib import Path

import pytest

from gpumgr.cli.examination import State, ok, skipped
from gpumgr.cli.examination.gpus import SharedNvml, look_at_device_nodes, look_at_driver, look_at_mig_devices, look_at_nvml
from gpumgr.driver.binding import NOT_SUPPORTED
from gpumgr.driver.driver import Nvml
from gpumgr.sim.library import SimNode
from tests.component.driver.conftest import Prepare

from .conftest import brief

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc 12\n"
NO_GPUS = "{about: none, driver_version: 550.90.07, cuda_version: 12.4, models: {}, gpus: []}"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  615.71.09  Release Build  (builder@host)  Mon Jun 1\n"


def gpus(node: SimNode, *, timeout_seconds: float = 10.0) -> SharedNvml:
    return SharedNvml(Nvml(library_path=node.library_path, sysfs_root=node.sysfs_root, timeout_seconds=timeout_seconds))


@pytest.fixture
def no_gpus(tmp_path: Path) -> SharedNvml:
    """A host without a driver."""
    return SharedNvml(Nvml(library_path=str(tmp_path / "libnvidia-ml.so.1")))


def lay_out_dev(root: Path, *names: str) -> Path:
    root.mkdir(exist_ok=True)
    for name in names:
        (root / name).symlink_to("/dev/null")
    return root


@pytest.mark.parametrize(
    ("version", "devices", "state", "message"),
    [
        (PROPRIETARY, "195 nvidia\n511 nvidia-uvm\n", "ok", "535.104.05"),
        (OPEN, "195 nvidia\n511 nvidia-uvm\n", "ok", "615.71.09"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  418.67  Sat Apr  6 03:07:24 CDT 2019\n", None, "ok", "418.67"),
        ("something new\nGCC version:  gcc 12.2\n", "511 nvidia-uvm\n", "ok", "something new"),
        (OPEN, "195 nvidia\n", "warning", "615.71.09, but the module nvidia-uvm is not loaded: CUDA can't start"),
    ],
)
async def test_the_kernel_module(version: str, devices: str | None, state: State, message: str, tmp_path: Path) -> None:
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(version)
    if devices is not None:
        (tmp_path / "devices").write_text(devices)
    assert brief(look_at_driver(tmp_path, tmp_path / "dev", simulated=False)) == (state, message)


async def test_no_kernel_module(tmp_path: Path) -> None:
    found = look_at_driver(tmp_path, tmp_path / "dev", simulated=False)
    assert brief(found) == ("error", f"NVIDIA's kernel module is not loaded ({tmp_path}/driver/nvidia/version is missing)")
    assert "modprobe -a nvidia nvidia-uvm" in str(found.remedy)
    found = look_at_driver(tmp_path, lay_out_dev(tmp_path, "dxg"), simulated=False)
    assert found == skipped(f"WSL2 has {tmp_path}/dxg in its place")


@pytest.mark.parametrize(("listed", "count", "state"), [("mixed-2", 2, "warning"), ("none.yaml", 0, "error")])
async def test_gpus_that_the_driver_does_not_list_are_named(
    sim_node: Prepare, tmp_path: Path, listed: str, count: int, state: State
) -> None:
    (tmp_path / "none.yaml").write_text(NO_GPUS)
    node = sim_node(listed if count else str(tmp_path / listed))
    device = node.sysfs_root / "bus/pci/devices/0000:aa:00.0"
    device.mkdir()
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    found = await look_at_nvml(gpus(node))
    assert found.state == state
    assert f"the driver lists {count} of the {count + 1} NVIDIA GPUs on the PCI bus, not 0000:aa:00.0" in found.message


async def test_nvml_reports_versions_and_gpus_and_names_what_is_not_offered(sim_node: Prepare) -> None:
    node = sim_node("hgx-h100-8")
    assert await look_at_nvml(gpus(node)) == ok("driver 550.90.07, CUDA 12.4, 8 NVIDIA H100 80GB HBM3")
    node.control.lose_gpu(2)
    node.control.set_mig(4, enabled=True)
    found = await look_at_nvml(gpus(node))
    assert (found.state, "7 GPUs; GPU2: " in found.message, "GPU4 is in MIG mode" in found.message) == ("warning", True, True)


async def test_the_mig_devices_of_a_gpu_in_mig_mode_are_counted(sim_node: Prepare) -> None:
    text = "GPU2 is in MIG mode (MIG devices: 1 x 3g.20gb, 1 x 2g.10gb, 2 x 1g.5gb)"
    for offered, state in ((False, "warning"), (True, "ok")):
        found = await look_at_nvml(gpus(sim_node("mig-4")), mig_offered=offered)
        assert (found.state, text in found.message) == (state, True)


async def test_mig_devices_that_no_container_of_the_checkpoint_has_are_named(sim_node: Prepare, tmp_path: Path) -> None:
    found = await look_at_mig_devices(gpus(sim_node("mig-4")), tmp_path)
    assert (found.state, "3g.20gb on GPU2 (MIG-" in found.message) == ("warning", True)
    assert "end the pods" in str(found.remedy)
    assert (await look_at_mig_devices(gpus(sim_node("hgx-h100-8")), tmp_path)).state == "ok"


async def test_no_driver_is_an_error_with_a_sentence(no_gpus: SharedNvml) -> None:
    found = await look_at_nvml(no_gpus)
    assert (found.state, found.message.startswith("the NVML library can't be loaded: ")) == ("error", True)
    assert found.remedy


async def test_a_driver_that_hangs_is_left(sim_node: Prepare) -> None:
    node = sim_node("mixed-2")
    node.control.hang()
    found = await look_at_nvml(gpus(node, timeout_seconds=0.05))
    assert brief(found) == ("error", "NVML gave no answer within 0.05 s: the driver hangs")
    node.control.clear()


# -- device nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minors", "names", "state", "message"),
    [
        (True, "nvidia0 nvidia1 nvidiactl nvidia-uvm", "ok", "nvidia0, nvidia1, nvidiactl, nvidia-uvm in {}"),
        (False, "dxg", "ok", "dxg in {}, for GPUs without a minor number (WSL2)"),
        (False, "nvidiactl", "error", "the driver reports no minor number for 2 GPUs, and {}/dxg is missing or not a device"),
    ],
)
async def test_each_gpu_needs_its_device_node_or_the_one_of_wsl(
    sim_node: Prepare, tmp_path: Path, minors: bool, names: str, state: State, message: str
) -> None:
    node = sim_node("mixed-2")
    if not minors:
        node.control.set_result("nvmlDeviceGetMinorNumber", NOT_SUPPORTED)
    found = await look_at_device_nodes(gpus(node), lay_out_dev(tmp_path, *names.split()), simulated=False)
    assert brief(found) == (state, message.format(tmp_path))


async def test_missing_device_nodes_are_named_with_the_command_that_makes_them(sim_node: Prepare, tmp_path: Path) -> None:
    dev = lay_out_dev(tmp_path, "nvidia0", "nvidiactl")
    (dev / "nvidia-uvm").write_text("no device")
    found = await look_at_device_nodes(gpus(sim_node("mixed-2")), dev, simulated=False)
    assert brief(found) == ("error", f"missing or no devices: {dev}/nvidia1, {dev}/nvidia-uvm")
    assert "`nvidia-modprobe -u -c 0 && nvidia-modprobe -c 0 && nvidia-modprobe -c 1`" in str(found.remedy)


@pytest.mark.parametrize(
    ("names", "state", "message"),
    [
        ("nvidia3 nvidiactl nvidia-uvm", "ok", "nvidia3, nvidiactl, nvidia-uvm in "),
        ("nvidiactl nvidia-uvm", "error", "no "),
        ("", "error", "missing or no devices: "),
    ],
)
async def test_without_nvml_any_gpus_node_will_do(
    names: str, state: State, message: str, no_gpus: SharedNvml, tmp_path: Path
) -> None:
    found = await look_at_device_nodes(no_gpus, lay_out_dev(tmp_path / "dev", *names.split()), simulated=False)
    assert (found.state, found.message.startswith(message)) == (state, True)
