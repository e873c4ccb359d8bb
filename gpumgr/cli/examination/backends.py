"""What the enforcement backends need: NVIDIA's MPS, and the libraries that the operator supplies."""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, aside, error, error_of, ok, skipped, warning
from gpumgr.common.errors import MpsError
from gpumgr.compat.gpu_manager.vcuda.backend import EXPORTS
from gpumgr.enforcement import operator_library
from gpumgr.enforcement.hami_core.backend import FOLDER
from gpumgr.enforcement.hami_core.volume import unbounded
from gpumgr.enforcement.mps import launcher, probe
from gpumgr.enforcement.mps.commands import CAVEATS, MpsProtocol
from gpumgr.enforcement.mps.control import find_control_program
from gpumgr.enforcement.operator_library import LibraryError
from gpumgr.settings.installed_library import VERSION
from gpumgr.settings.schema import BackendName, MpsSettings

IF_HUNG: Final = "look whether the driver answers (`nvidia-smi`) and whether the file system does"
_BOUND: Final = (
    "run the agent as root; in a pod mount run_dir with Bidirectional propagation from a shared mount of the host (the chart does); then "
    "restart these containers"
)
_ONE_USER: Final = "let the containers that share a GPU run under one user id, or install a newer driver"


async def look_at_mps(
    mps: MpsSettings, words: Collection[str], *, run_dir: Path, state_dir: Path, in_pod: bool, timeout_seconds: float
) -> CheckResult:
    """`words`: the backends that the settings name, "auto" included. `in_pod`: MPS is the host's, and its `run_dir` must be mounted.
    `state_dir` has the result of the agent's try of a daemon; the doctor starts none."""
    if not {"auto", "nvml-memory", "mps"} & set(words):
        return skipped(f"not used: enforcement.backend is {' and '.join(sorted(words))}")
    how = launcher.best_method(in_pod=in_pod)
    try:
        control = await find_control_program(mps.control_program, how, run_dir, timeout_seconds=timeout_seconds)
        features = await control.features()
    except MpsError as exception:
        return error_of(exception, "reinstall the driver", "error" if "mps" in words else "warning")
    program, protocol = control.program, mps.protocol
    protocols = " and ".join(map(str, sorted(features)))
    if protocol not in ("auto", *map(str, features)):
        return error(
            f"{program} speaks protocol {protocols}, mps.protocol is {protocol}",
            "set mps.protocol to auto, or install driver r615 or newer",
        )
    newest: MpsProtocol = 3 if protocol == "3" or (protocol == "auto" and 3 in features) else 2
    try:
        tried = await aside(lambda: probe.last_result(state_dir, probe.identify(program, newest, how)))
    except OSError:
        tried = None
    if tried is not None and tried.failure is not None:
        return (error if "mps" in words else warning)(tried.failure, "see the agent's log; it tries again every 10 minutes")
    multiuser = bool(features[newest])
    users = "one server for all users" if multiuser else "a server for one user at a time"
    known = "; ".join(CAVEATS[newest])
    where = ", daemons are units of the host's systemd" if in_pod else ""
    works = ", a daemon was tried and works" if tried is not None else ""
    message = f"{program} speaks protocol {protocols} ({newest} is used), {users}{where}{works}"
    if not multiuser:
        return warning(f"{message}: containers of other users wait; mind: {known}", _ONE_USER)
    return ok(f"{message}; mind: {known}")


async def look_at_library(backend: BackendName, path: Path | None, sha256: str | None, words: Collection[str]) -> CheckResult:
    """The operator's library of a backend: it exists, is an ELF file for this machine, has the configured hash, and exports what programs
    look for."""
    section = backend.replace("-", "_")
    if path is None or sha256 is None:
        lacking = f"{section}.{'library_path' if path is None else 'library_sha256'} is not set"
        if path is None and backend not in words:
            return skipped(lacking)
        install = "install it with `gpumgr install library`, or " if backend == "hami-core" else ""
        return error(lacking, f"{install}set {section}.library_path and {section}.library_sha256 (`sha256sum` prints it)")
    try:
        exports = EXPORTS if backend == "vcuda" else ()
        found = await aside(lambda: operator_library.check(path, sha256, exports=exports))
    except LibraryError as exception:
        return error_of(exception, f"put the right file there, or change {section}.library_path and library_sha256")
    return ok(f"{found.path}, SHA-256 {found.sha256[:12]}…{await aside(lambda: _version(path))}")


async def look_at_hami_core(
    path: Path | None, sha256: str | None, words: Collection[str], run_dir: Path, proc_root: Path, *, in_pod: bool
) -> CheckResult:
    """The library, and whether a container can fill `run_dir` through its region. `in_pod`: the command runs in the agent's pod."""
    found = await look_at_library("hami-core", path, sha256, words)
    if found.state != "ok" or not {"auto", "hami-core"} & set(words):
        return found
    try:
        plain = await aside(lambda: unbounded(run_dir / FOLDER))
    except OSError:  # only root may list it
        plain = []
    if plain:
        fault = f"the regions of {len(plain)} containers lie in plain folders, such as {run_dir / FOLDER / plain[0]}"
    elif in_pod and not propagates(await aside((proc_root / "self/mountinfo").read_text), run_dir):
        fault = f"mounts below {run_dir} do not reach the host, so regions lie in plain folders"
    else:
        return found
    return warning(f"{found.message}; {fault}: a container can take all room of {run_dir} (enforcement.run_dir)", _BOUND)


def propagates(mountinfo: str, folder: Path) -> bool:
    """Whether mounts below the folder reach the mount namespaces with which it is shared. Source: proc(5), /proc/PID/mountinfo."""
    lines = [line.split() for line in mountinfo.splitlines()]
    mounts = {Path(fields[4]): fields[6 : fields.index("-")] for fields in lines if "-" in fields[6:]}
    return any(
        field.startswith("shared:") for field in next((mounts[at] for at in (folder, *folder.parents) if at in mounts), ())
    )


def _version(library: Path) -> str:
    """The version with which a library was installed; a library elsewhere has none."""
    try:
        text = library.with_name(VERSION).read_text(errors="replace")
    except OSError:
        return ""
    return f", version {text.strip()[:200]}"
