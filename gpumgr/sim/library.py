"""Prepares a simulated node: compiles the simulated NVML once, renders the node's files, creates its /sys, and simulates processes.

A prepared folder has `libnvidia-ml.so.1` (a copy, because the library finds its files beside itself), `node.txt`, `control.txt` after the
first fault, `sys/`, and with processes `proc/` and `cgroup/`. A process that loads the library of this folder sees the node.

`proc` and `cgroup` have only what the agent reads (sources: proc(5), cgroups(7)): PID/stat with state and start time, PID/cgroup, `mounts`
with the hierarchy (v2), and each cgroup's `cgroup.procs`. As in the kernel, a process appears and disappears atomically.
"""

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.common.compiler import compiled
from gpumgr.common.errors import InputError
from gpumgr.common.files import replace_file
from gpumgr.placement.devices import MigProfile
from gpumgr.sim.control import SimControl, instance_fact
from gpumgr.sim.nodes import NodeDescription, load_node

_PROC: Final = "proc"
_CGROUPS: Final = "cgroup"
_FIRST_PID: Final = 20_001
#: sysconf(_SC_CLK_TCK), the unit of start times, is 100 on x86-64 and arm64.
_TICKS_PER_SECOND: Final = 100


def proc_root_of(sim_dir: Path) -> Path:
    """The simulated node's /proc, or the host's if `sim_dir` has none."""
    own = sim_dir / _PROC
    return own if own.is_dir() else Path("/proc")


class SimProcesses:
    """Simulated processes, as files in `sim_dir`. Create it before an agent starts there. Pids are never reused."""

    def __init__(self, sim_dir: Path) -> None:
        self.proc_root = sim_dir / _PROC
        self.cgroup_root = sim_dir / _CGROUPS
        self._pids: Iterator[int] = itertools.count(_FIRST_PID)
        self._cgroups: dict[int, str] = {}
        for root in (self.proc_root, self.cgroup_root):
            root.mkdir(parents=True, exist_ok=True)
        # fstab(5): blanks and backslashes are octal numbers.
        point = str(self.cgroup_root.resolve()).replace("\\", r"\134").replace(" ", r"\040")
        replace_file(self.proc_root / "mounts", f"cgroup2 {point} cgroup2 rw,nosuid,nodev,noexec 0 0\n", durable=False)

    def start(self, cgroup: str = "/") -> int:
        """Starts a process in `cgroup` (an absolute path in the hierarchy, created if missing); returns its pid."""
        pid = next(self._pids)
        coming = self.proc_root / f".{pid}"
        coming.mkdir()
        started = int(time.monotonic() * _TICKS_PER_SECOND)
        # Fields 3 to 24: running, parent 1, ..., priority 20, nice 0, one thread, start time, size and pages.
        replace_file(coming / "stat", f"{pid} (worker) R 1{' 0' * 13} 20 0 1 0 {started} 0 0\n", durable=False)
        replace_file(coming / "cgroup", f"0::{cgroup}\n", durable=False)
        coming.rename(self.proc_root / str(pid))
        self._cgroups[pid] = cgroup
        self._write_procs(cgroup)
        return pid

    def end(self, pid: int) -> None:
        """Ends the process. Its cgroup stays. Raises KeyError if the process does not exist."""
        cgroup = self._cgroups.pop(pid)
        going = self.proc_root / f".{pid}"
        (self.proc_root / str(pid)).rename(going)
        shutil.rmtree(going)
        self._write_procs(cgroup)

    def end_cgroup(self, cgroup: str) -> tuple[int, ...]:
        """Ends the processes in the cgroup and removes the cgroup. Returns the ended pids."""
        pids = self.of(cgroup)
        for pid in pids:
            self.end(pid)
        shutil.rmtree(self._folder(cgroup), ignore_errors=True)
        return pids

    def of(self, cgroup: str) -> tuple[int, ...]:
        """The pids in the cgroup, oldest first."""
        return tuple(pid for pid, place in self._cgroups.items() if place == cgroup)

    def _write_procs(self, cgroup: str) -> None:
        folder = self._folder(cgroup)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "cgroup.procs", "".join(f"{pid}\n" for pid in self.of(cgroup)), durable=False)

    def _folder(self, cgroup: str) -> Path:
        return self.cgroup_root / cgroup.lstrip("/")


_LIBRARY: Final = "libnvidia-ml.so.1"
_SOURCE: Final = Path(__file__).with_name("nvml.c")
# No soname: a later search for libnvidia-ml.so.1 in the same process must not find a simulated library that is still mapped.
_FLAGS: Final = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
_MIB: Final = 1024 * 1024
#: The MIG profile with one slice and the media engines: NVML's number of the profile, and the driver's id.
_WITH_MEDIA: Final = (7, 20)
_MIG_NUMBER: Final = {"unsupported": -1, "disabled": 0, "enabled": 1}


class SimNode(msgspec.Struct, frozen=True, kw_only=True):
    description: NodeDescription
    library_path: str
    sysfs_root: Path
    proc_root: Path
    control: SimControl


def prepare(name_or_path: str, state_dir: Path) -> SimNode:
    """Creates the node's files in `state_dir` (created if missing); keeps an existing control file.

    Raises SettingsError for an invalid description, InputError without a C compiler or if the folder can't be written.
    """
    description = load_node(name_or_path)
    library = compile_library()
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        target = state_dir / _LIBRARY
        for path, content in ((target, library.read_bytes()), (state_dir / "node.txt", render_node(description).encode())):
            if not path.exists() or path.read_bytes() != content:
                replace_file(path, content, durable=False)  # a library that another process has mapped must not change
        lay_out_sysfs(description, state_dir / "sys")
    except OSError as exc:
        raise InputError(f"the simulated node can't be created in {state_dir}: {exc.strerror or exc}") from exc
    return SimNode(
        description=description,
        library_path=str(target),
        sysfs_root=state_dir / "sys",
        proc_root=proc_root_of(state_dir),
        control=SimControl(state_dir / "control.txt"),
    )


def compile_library() -> Path:
    """The library, compiled on first use and kept under $XDG_CACHE_HOME/gpumgr. Raises InputError."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpumgr"
    what, remedy = "the simulated NVML library", "set CC to a C compiler and XDG_CACHE_HOME to a folder that you can write to"
    return compiled(_SOURCE, _FLAGS, folder=folder, suffix=".so", what=what, remedy=remedy)


def render_node(node: NodeDescription) -> str:
    major, minor = node.cuda_version.split(".")
    lines = [
        f"driver {node.driver_version}",
        f"nvml {major}.{node.driver_version}",
        f"cuda {int(major) * 1000 + int(minor) * 10}",
    ]
    lines += [f"without {function}" for function in node.without]
    for index, gpu in enumerate(node.gpus):
        model = node.model_of(index)
        identity = [index, node.uuid_of(index), _nvml_bus_id(gpu.bus_id), node.minor_of(index)]
        memory = [model.memory_mib * _MIB, int(model.reserved_mib * _MIB)]
        place = [-1 if gpu.numa_node is None else gpu.numa_node]
        rest = [_MIG_NUMBER[model.mig], model.idle_celsius, round(model.idle_watts * 1000)]
        lines.append(f"gpu {' '.join(map(str, identity + memory + place + rest))} {model.model}")
        lines += [f"unsupported {index} {function}" for function in model.unsupported]
        for number, each in node.mig_profiles_of(index).items():
            lines.append(_profile_line(index, number, each, instances=len(each.starts)))
            if number == 0:  # one instance may have the media engines, too
                with_media = replace(each, name=f"{each.name}+me", number=_WITH_MEDIA[1])
                lines.append(_profile_line(index, _WITH_MEDIA[0], with_media, instances=1))
        lines += [f"instance {index} {number} {instance_fact(mig)}" for number, mig in enumerate(node.mig_instances_of(index))]
    for a in range(len(node.gpus)):
        lines += [f"level {a} {b} {node.nvml_level(a, b)}" for b in range(a + 1, len(node.gpus))]
        lines += [f"link {a} {number} {kind} {_nvml_bus_id(bus_id)}" for number, (kind, bus_id) in enumerate(_links_of(node, a))]
    return "\n".join(lines) + "\n"


def _profile_line(gpu: int, number: int, profile: MigProfile, *, instances: int) -> str:
    starts = sum(1 << start for start in profile.starts)
    sizes = f"{profile.slices} {profile.size} {starts} {instances} {profile.memory_mebibytes}"
    return f"profile {gpu} {number} {profile.number} {sizes} {profile.name}"


def _links_of(node: NodeDescription, index: int) -> list[tuple[str, str]]:
    """The remote ends of the GPU's NVLinks in link order: ("gpu" or "switch", bus id)."""
    links = [
        ("gpu", node.gpus[b if a == index else a].bus_id) for a, b, count in node.nvlinks if index in (a, b) for _ in range(count)
    ]
    if node.fabric:
        switches = node.fabric.switches
        links += [("switch", switches[number % len(switches)]) for number in range(node.fabric.links_per_gpu)]
    return links


def _nvml_bus_id(bus_id: str) -> str:
    """NVML writes eight digits for the domain, and upper case."""
    return f"0000{bus_id}".upper()


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="ascii") if path.is_file() else None


def lay_out_sysfs(node: NodeDescription, root: Path) -> None:
    """Creates the part of /sys with vendors, classes, NUMA nodes and PCI parents. bus/pci/devices/BUS_ID links into devices/."""
    links = root / "bus" / "pci" / "devices"
    links.mkdir(parents=True, exist_ok=True)
    for gpu in node.gpus:
        place = Path("devices", *gpu.pcie, gpu.bus_id)
        (root / place).mkdir(parents=True, exist_ok=True)
        numa_node = -1 if gpu.numa_node is None else gpu.numa_node
        facts = {"numa_node": f"{numa_node}\n", "vendor": "0x10de\n", "class": "0x030200\n"}
        link, target = links / gpu.bus_id, Path("../../..") / place
        if link.is_symlink() and link.readlink() == target and facts == {name: _text_of(link / name) for name in facts}:
            continue  # a second agent (rolling update) may read these files now, so they are not written again
        for name, text in facts.items():
            (root / place / name).write_text(text, encoding="ascii")
        link.unlink(missing_ok=True)
        link.symlink_to(target)
