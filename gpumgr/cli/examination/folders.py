"""Checks the folders that the agent writes: whether they can be written, whether a pod mounts them from the host, and whether the
checkpoint can be used.

The content of the checkpoint is not changed. If the agent was killed, sqlite may rebuild its shared-memory index (-shm).
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from gpumgr.cli.examination import CheckResult, error, error_of, ok, skipped, warning
from gpumgr.cli.options import unread_sentence
from gpumgr.common.errors import CheckpointError
from gpumgr.common.proc import mount_of
from gpumgr.common.units import count_text
from gpumgr.ledger.store import read_checkpoint
from gpumgr.ledger.tables import CorruptError
from gpumgr.settings import Settings

IF_HUNG: Final = "check whether the file systems of the settings' folders answer (`df`)"
_REMEDY: Final = "set these settings to folders on a file system that the agent may write to"


def backend_words(settings: Settings) -> frozenset[str]:
    """The backends that the settings name; "auto" is one of them."""
    return frozenset({settings.enforcement.backend, *(rule.partition("=")[2] for rule in settings.enforcement.overrides)})


def uses_cdi(settings: Settings) -> bool:
    """Whether containers get their devices by CDI."""
    return settings.enforcement.injection == "cdi" or settings.node.mode == "dra"


def written(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Yields (setting, folder) for the folders that the agent writes."""
    yield "checkpoint.dir", settings.checkpoint.dir
    yield "process.lock_path", settings.process.lock_path.parent
    yield "container.allocation_dir", settings.container.allocation_dir
    if backend_words(settings) - {"none"}:
        yield "enforcement.run_dir", settings.enforcement.run_dir
    if uses_cdi(settings):
        yield "enforcement.cdi_dir", settings.enforcement.cdi_dir


def of_host(settings: Settings) -> dict[str, Path]:
    """setting -> folder, for the folders that the kubelet, the runtime, other containers or the next agent read. In a pod they must be
    mounted from the host."""
    kubelet = settings.kubelet
    found = {
        "kubelet.device_plugin_dir": kubelet.device_plugin_dir,
        "kubelet.pod_resources_socket": kubelet.pod_resources_socket.parent,
    }
    if settings.node.mode == "dra":
        found |= {"kubelet.plugins_dir": kubelet.plugins_dir, "kubelet.plugins_registry_dir": kubelet.plugins_registry_dir}
    return {**found, **dict(written(settings))}


def look_at_folders(folders: Mapping[str, Path]) -> CheckResult:
    """`folders`: setting -> its folder. The check leaves no file."""
    if obstacles := [f"{path} ({key}): {why}" for key, path in folders.items() if (why := obstacle(path))]:
        return error(f"can't be written: {', '.join(obstacles)}", _REMEDY)
    return ok(f"{len(set(folders.values()))} folders can be written")


def obstacle(folder: Path) -> str | None:
    """Why nothing can be created in the folder, or why the folder can't be made."""
    nearest = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".gpumgr-doctor-", dir=nearest))
    except OSError as exception:
        reason = exception.strerror or str(exception)
        return reason if nearest == folder else f"it can't be made in {nearest}: {reason}"
    return None


def look_at_settings(unread: Path) -> CheckResult:
    """`unread`: a file that had settings of earlier versions, and is no longer read."""
    if unread.exists():
        message, _, remedy = unread_sentence(unread).partition("; ")
        return warning(message, remedy)
    return ok("no settings file of earlier versions is left")


_READ: Final = "run the agent and this command as root, or set checkpoint.dir to a folder that both may read"


def look_at_checkpoint(folder: Path) -> CheckResult:
    """`folder`: the setting checkpoint.dir."""
    try:
        loaded = read_checkpoint(folder)
    except CorruptError as damaged:
        return warning(
            str(damaged),
            "nothing to do: the agent sets the file aside and rebuilds the ledger from the kubelet; if this repeats, check the disk",
        )
    except CheckpointError as exception:
        return error_of(exception, _READ)
    if loaded.lost:
        return ok(f"{loaded.why}: the agent creates one")
    if broken := loaded.ledger.violations():
        return warning(
            f"the checkpoint in {folder} contradicts itself: {broken[0]}",
            "nothing to do: the agent sets the file aside and rebuilds the ledger from the kubelet",
        )
    return ok(f"{count_text(len(loaded.ledger.allocations), 'allocation')} in {folder}")


#: An emptyDir is deleted with its pod.
_EMPTY_DIR: Final = "/kubernetes.io~empty-dir/"


def look_at_host_paths(folders: Mapping[str, Path], proc_root: Path, *, in_pod: bool) -> CheckResult:
    """`in_pod`: the command runs in a pod's container."""
    if not in_pod:
        return skipped("not in a pod")
    mountinfo = (proc_root / "self/mountinfo").read_text()
    own = [f"{path} ({key})" for key, path in folders.items() if _is_own(path, mountinfo)]
    if not own:
        return ok(f"{len(folders)} folders are mounted from the host")
    return error(
        f"not mounted from the host: {', '.join(own)}; the host and the next agent do not find what this agent writes there",
        "add a hostPath volume for each of them, mounted at the same path",
    )


def _is_own(path: Path, mountinfo: str) -> bool:
    """Whether `path` is in the container's own file system, or in an emptyDir of the pod."""
    mount = mount_of(mountinfo, path)
    return mount is None or mount.point == Path("/") or _EMPTY_DIR in f"{mount.root}/"
