"""Finds the driver's files for the volumes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumgr.common.errors import DriverFilesError
from gpumgr.compat.gpu_manager.driver_files.libraries import SharedLibrary, find_binary, find_libraries
from gpumgr.compat.gpu_manager.driver_files.source import Source, inspect
from gpumgr.compat.gpu_manager.driver_files.volume_conf import Volume
from gpumgr.compat.gpu_manager.driver_files.volume_plan import COMPANION, version_of

_LIBCUDA = "libcuda.so"


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeSources:
    """The files of one volume's lists. `missing`: entries without a file."""

    libraries: tuple[Source, ...]
    binaries: tuple[Source, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverInstallation:
    """The driver below one root: all files of a mirror belong to the same driver."""

    root: Path
    libraries: Mapping[SharedLibrary, Source]

    def select(self, volume: Volume) -> VolumeSources:
        """Raises OSError, DriverFilesError."""
        binaries = {name: find_binary(self.root, name) for name in volume.binaries}
        missing = [name for name, path in binaries.items() if path is None]
        missing += [prefix for prefix in volume.libraries if not any(library.matches([prefix]) for library in self.libraries)]
        return VolumeSources(
            libraries=tuple(source for library, source in self.libraries.items() if library.matches(volume.libraries)),
            binaries=tuple(inspect(path, name) for name, path in binaries.items() if path),
            missing=tuple(missing),
        )


def find_driver(roots: Sequence[Path], volumes: Sequence[Volume], *, machine: str, driver_version: str) -> DriverInstallation:
    """The first root that has libcuda of the loaded driver, for this machine. Raises DriverFilesError, OSError."""
    prefixes = tuple(dict.fromkeys([_LIBCUDA, *(prefix for volume in volumes for prefix in volume.libraries)]))
    machines = {machine, COMPANION.get(machine, machine)}
    others: list[str] = []
    for root in roots:
        libraries = {each: inspect(each.path, each.path.name) for each in find_libraries(root, prefixes, machines)}
        for library, source in libraries.items():
            if not library.matches([_LIBCUDA]):
                continue
            # A file without a version in its name is accepted.
            if source.elf and source.elf.machine == machine and version_of(source.name) in (None, driver_version):
                return DriverInstallation(root=root, libraries=libraries)
            others.append(f"{library.path} ({source.elf.machine if source.elf else source.not_elf})")
    raise DriverFilesError(
        f"libcuda.so.{driver_version} for {machine}, the library of the loaded driver, is not below {' or '.join(map(str, roots))}"
        f"{'; there is ' + ', '.join(others) if others else ''}: install the libraries of this driver, "
        "or load the driver of these libraries (after an update: reboot)"
    )
