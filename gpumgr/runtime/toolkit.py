"""Decides, from what the container runtime reports, whether NVIDIA's container toolkit adds the driver's files to containers.

The toolkit acts in containers of its own runtime (nvidia-container-runtime), and in containers that name a device of its CDI specs;
containers that get GPUs from gpumgr name none. Source: NVIDIA Container Toolkit, architecture overview.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from gpumgr._pb.runtime.v1 import StatusResponse
from gpumgr.common.foreign_text import decode_json
from gpumgr.ledger.answer import DriverAccess

_TOOLKIT: Final = re.compile("nvidia", re.IGNORECASE)


class Runtimes(msgspec.Struct, frozen=True, kw_only=True):
    """The low-level runtimes. `programs`: name -> program, "" if it is not reported. `default`: the name of the runtime for pods without a
    runtime class; None: not reported."""

    default: str | None = None
    programs: Mapping[str, str] = msgspec.field(default_factory=dict)

    def of_toolkit(self) -> tuple[str, ...]:
        return tuple(name for name, program in self.programs.items() if _TOOLKIT.search(f"{name} {Path(program).name}"))

    def describe_default(self) -> str:
        program = self.programs.get(self.default or "", "")
        return f"{self.default}{f' ({program})' if program else ''}"


class _Runtime(msgspec.Struct, frozen=True):
    path: str = msgspec.field(name="runtimePath", default="")
    options: dict[str, Any] | None = None


class _Containerd(msgspec.Struct, frozen=True):
    default: str = msgspec.field(name="defaultRuntimeName", default="")
    runtimes: dict[str, _Runtime] | None = None


class _Config(msgspec.Struct, frozen=True):
    """The object under the key "config". containerd writes it (source: pkg/cri/config in 1.6, internal/cri/config in 2.x), CRI-O does not
    (server/runtime_status.go)."""

    containerd: _Containerd | None = None


def parse_runtimes(status: StatusResponse) -> Runtimes:
    """The runtimes in the answer to a verbose request for the status. Raises UnreadableText if its JSON is not as expected."""
    config = decode_json(status.info.get("config", "{}"), _Config)
    names = [each.name for each in status.runtime_handlers if each.name]
    if config.containerd is None:
        # CRI lists the default runtime a second time, under an empty name.
        return Runtimes(default=names[0] if len(names) == 1 else None, programs=dict.fromkeys(names, ""))
    programs = {name: _program(each) for name, each in (config.containerd.runtimes or {}).items()}
    return Runtimes(default=config.containerd.default or None, programs=programs)


def _program(runtime: _Runtime) -> str:
    binary = (runtime.options or {}).get("BinaryName")
    return binary if isinstance(binary, str) and binary else runtime.path


def driver_access(setting: str, runtimes: Runtimes | None) -> DriverAccess:
    """Decides whether gpumgr mounts the driver's files or the toolkit adds them. `setting`: container.driver_files; `runtimes` None: the
    container runtime has not answered yet. In doubt gpumgr mounts the files and keeps the toolkit from adding them, which works with and
    without the toolkit."""
    if setting == "toolkit":
        return DriverAccess(mounted=False, toolkit=True, why="container.driver_files is toolkit")
    if runtimes is None:
        silent = "the container runtime has not reported its default runtime"
        return DriverAccess(toolkit=True, why="container.driver_files is mounts" if setting == "mounts" else silent)
    found = runtimes.of_toolkit()
    there = bool(found) or not runtimes.programs
    if setting == "mounts":
        return DriverAccess(toolkit=there, why="container.driver_files is mounts")
    if runtimes.default is None:
        return DriverAccess(toolkit=there, why="the container runtime does not report which of its runtimes is the default one")
    if runtimes.default in found:
        return DriverAccess(
            mounted=False, toolkit=True, why=f"the default runtime, {runtimes.describe_default()}, is NVIDIA's container toolkit"
        )
    others = f"; these runtimes belong to the toolkit, for pods with their runtime class: {', '.join(found)}" if found else ""
    return DriverAccess(
        toolkit=there, why=f"the default runtime, {runtimes.describe_default()}, is not NVIDIA's container toolkit{others}"
    )
