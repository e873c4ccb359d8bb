"""Checks of the driver: its kernel module, its library, its device nodes."""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from gpumgr.cli.examination import CheckResult, aside, error, error_of, ok, skipped, warning
from gpumgr.common.errors import GpumgrError
from gpumgr.driver.driver import Nvml
from gpumgr.ledger.answer import CONTROL_NODES, WSL_NODE
from gpumgr.ledger.node import NO_MEMORY
from gpumgr.ledger.store import read_checkpoint
from gpumgr.placement.devices import Gpu, NodeSnapshot

INSTALL: Final = "install NVIDIA's driver and run `modprobe -a nvidia nvidia-uvm`, then look at `dmesg | grep -i nvrm`"
IF_HUNG: Final = (
    "look at `dmesg | grep -i -e nvrm -e xid`; a driver that hangs for good needs a reboot of the drained node, a slow one needs "
    "nvidia-persistenced"
)

#: The driver's version, in the text of /proc/driver/nvidia/version.
_VERSION: Final = re.compile(r"^NVRM version:.*?([0-9]+(?:\.[0-9]+)+)", re.MULTILINE)

T = TypeVar("T")


class SharedNvml:
    """Checks use the session one after another, because a process can have only one NVML session."""

    def __init__(self, nvml: Nvml) -> None:
        self.nvml = nvml
        self._asking = asyncio.Lock()
        self._snapshot: asyncio.Task[NodeSnapshot] | None = None

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """Calls `question` with the session open. Raises NvmlError."""
        async with self._asking:
            try:
                await self.nvml.open()
                return await question()
            finally:
                await self.nvml.close()

    async def snapshot(self) -> NodeSnapshot:
        """The snapshot is read once for all checks. Raises NvmlError."""
        if self._snapshot is None:
            self._snapshot = asyncio.create_task(self.ask(self.nvml.snapshot))
        return await asyncio.shield(self._snapshot)


def look_at_driver(proc_root: Path, device_root: Path, *, simulated: bool) -> CheckResult:
    """The kernel module, as the driver shows it under /proc. WSL2 has none."""
    if simulated:
        return skipped("a simulated node has none")
    if (device_root / WSL_NODE).exists():
        return skipped(f"WSL2 has {device_root / WSL_NODE} in its place")
    file = proc_root / "driver/nvidia/version"
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return error(f"NVIDIA's kernel module is not loaded ({file} is missing)", INSTALL)
    found = _VERSION.search(text)
    shown = found[1] if found else text.partition("\n")[0].strip()
    try:
        devices = (proc_root / "devices").read_text(errors="replace").split()
    except OSError:
        devices = ["nvidia-uvm"]  # it is not known whether the module is loaded, so it is not reported as missing
    if "nvidia-uvm" not in devices:
        return warning(f"{shown}, but the module nvidia-uvm is not loaded: CUDA can't start", "run `modprobe nvidia-uvm`")
    return ok(shown)


async def look_at_nvml(gpus: SharedNvml, *, mig_offered: bool = False) -> CheckResult:
    """`mig_offered`: the agent offers MIG devices, so a GPU in MIG mode is no fault."""
    try:
        snapshot = await gpus.snapshot()
    except GpumgrError as exception:
        return error_of(exception, INSTALL)
    about = f"driver {snapshot.driver_version or 'unknown'}, CUDA {snapshot.cuda_version or 'unknown'}"
    failed, in_mig_mode = [f"GPU{each.index}: {each.reason}" for each in snapshot.failures], list(_in_mig_mode(snapshot))
    if trouble := failed + ([] if mig_offered else in_mig_mode):
        remedy = (
            "these are not offered: reset or replace what failed (`nvidia-smi -q`); for MIG set node.mig_strategy or hami.operating_mode "
            "(docs/mig.md), or turn it off with `nvidia-smi -mig 0`"
        )
        return warning(f"{about}, {len(snapshot.gpus)} GPUs; {'; '.join(trouble)}", remedy)
    if snapshot.unlisted_sentence:
        remedy = (
            "look at `dmesg | grep -i -e nvrm -e xid`; a GPU that the driver can't start needs a reset, a reboot, or a new slot"
        )
        return (warning if snapshot.gpus else error)(f"{about}; {snapshot.unlisted_sentence}", remedy)
    if not snapshot.gpus:
        return error(f"{about}, but no GPU", "check whether `lspci -d 10de:` shows one and what `dmesg | grep -i nvrm` says")
    without_memory = [f"GPU{gpu.index}: {NO_MEMORY}" for gpu in snapshot.gpus if gpu.memory_bytes is None]
    return ok("; ".join([f"{about}, {len(snapshot.gpus)} {_models(snapshot.gpus)}", *in_mig_mode, *without_memory]))


async def look_at_mig_devices(gpus: SharedNvml, checkpoint_dir: Path) -> CheckResult:
    """The MIG devices that the agent will destroy, because no container in its checkpoint has them. Only for settings with which the agent
    creates MIG devices on demand."""
    try:
        instances = [(gpu.index, each) for gpu in (await gpus.snapshot()).gpus if gpu.mig_profiles for each in gpu.mig_instances]
        loaded = await aside(read_checkpoint, checkpoint_dir)
    except GpumgrError:  # the checks of the driver and of the checkpoint report this
        return skipped("the MIG devices or the agent's checkpoint can't be read")
    held = {device.uuid for a in loaded.ledger.allocations.values() for device in a.mig_devices}
    if left := [f"{each.profile} on GPU{index} ({each.uuid})" for index, each in instances if each.uuid not in held]:
        return warning(
            f"no container of the agent's checkpoint has these MIG devices: {', '.join(left)}",
            "end the pods that use them before the agent starts: with hami.operating_mode mig it destroys MIG devices that have no "
            "processes and no container",
        )
    return ok(f"{len(instances)} MIG devices, each with a container")


def _in_mig_mode(snapshot: NodeSnapshot) -> Iterator[str]:
    for gpu in snapshot.gpus:
        if gpu.mig_enabled:
            profiles = Counter(instance.profile for instance in gpu.mig_instances)
            shown = ", ".join(f"{count} x {profile}" for profile, count in profiles.items()) or "none"
            yield f"GPU{gpu.index} is in MIG mode (MIG devices: {shown})"


def _models(gpus: tuple[Gpu, ...]) -> str:
    return " and ".join(dict.fromkeys(gpu.model or "unknown GPU" for gpu in gpus))


async def look_at_device_nodes(gpus: SharedNvml, device_root: Path, *, simulated: bool) -> CheckResult:
    """The device nodes that containers get: one per GPU, and the common ones."""
    if simulated:
        return skipped("a simulated node has none")
    try:
        minors = [gpu.minor for gpu in (await gpus.snapshot()).gpus]
    except GpumgrError:
        minors = None
    return await aside(_device_nodes, device_root, minors)


def _device_nodes(root: Path, minors: list[int | None] | None) -> CheckResult:
    """`minors`: the GPUs' minor numbers, None for a GPU without one. If NVML does not answer, `minors` is None, and one GPU's node must
    exist."""
    if minors and None in minors:
        node = root / WSL_NODE
        if node.is_char_device():
            return ok(f"{WSL_NODE} in {root}, for GPUs without a minor number (WSL2)")
        return error(
            f"the driver reports no minor number for {minors.count(None)} GPUs, and {node} is missing or not a device",
            "such GPUs are offered on WSL2 only; elsewhere `nvidia-smi -q` shows what the driver reports about them",
        )
    found = sorted(path.name for path in root.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    wanted = found if minors is None else [f"nvidia{minor}" for minor in minors]
    missing = [f"{root}/{node}" for node in (*wanted, *CONTROL_NODES) if not (root / node).is_char_device()]
    if missing:
        modprobe = " && ".join(["nvidia-modprobe -u -c 0", *(f"nvidia-modprobe -c {minor}" for minor in minors or ())])
        return error(f"missing or no devices: {', '.join(missing)}", f"run `{modprobe}`, or start nvidia-persistenced")
    if not wanted:
        return error(f"no {root}/nvidia0 or another GPU's node", INSTALL)
    return ok(f"{', '.join((*wanted, *CONTROL_NODES))} in {root}")
