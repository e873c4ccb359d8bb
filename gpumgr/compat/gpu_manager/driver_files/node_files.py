"""Decides how this node's containers get the driver's files, and keeps the mirror that containers mount (see `manager`)."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.common.errors import CriError, DriverFilesError, InputError
from gpumgr.compat.gpu_manager.driver_files.manager import DriverFiles, DriverMirror, is_supplied
from gpumgr.compat.gpu_manager.driver_files.volumes import WHOLE
from gpumgr.compat.gpu_manager.vcuda.files import build_client
from gpumgr.ledger.answer import CONTROL_NODES, WSL_NODE, DriverAccess
from gpumgr.runtime.cri import Runtimes, driver_access
from gpumgr.settings import Settings

log = structlog.get_logger(__name__)

RUNTIME_SECONDS = 0.5


class NodeDriverFiles:
    """Call `update` before GPUs are offered, and then periodically. `runtimes` queries the container runtime."""

    def __init__(self, settings: Settings, runtimes: Callable[[], Awaitable[Runtimes]], *, simulated: bool) -> None:
        self._settings, self._ask = settings, runtimes
        self._setting = settings.container.driver_files
        self._simulated, self._without_driver = simulated, simulated and self._setting == "auto"
        self._runtimes: Runtimes | None = None
        self._silence: str | None = None
        self._logged: DriverAccess | None = None
        self._mirror: DriverMirror | None = None
        self._made: DriverFiles | None = None
        #: Why the mirror, or its part for gpu-manager's library (vcuda), can't be made.
        self._error: str | None = None
        self._vcuda_error: str | None = None
        self._missing: str | None = None

    @property
    def access(self) -> DriverAccess:
        """How new containers, and restarting containers with a CDI spec, get the files."""
        if self._without_driver:
            return DriverAccess(mounted=False, why="a simulated node has no driver files")
        found = driver_access(self._setting, self._runtimes)
        if self._undecided:
            # Before the runtime's first answer, an earlier agent's mirror shows that containers need mounts.
            return replace(found, mounted=self._settings.container.driver_whole_dir.is_symlink())
        return found

    @property
    def _undecided(self) -> bool:
        return self._setting == "auto" and self._runtimes is None

    async def update(self, driver_version: str | None) -> None:
        """Queries the container runtime, and makes this driver's mirror if one is needed. While the runtime is silent, its last answer
        counts."""
        await self._ask_runtime()
        self._look_at_device_nodes()
        if driver_version is not None and self._wanted() and not self._is_mirrored(driver_version):
            await self._mirror_driver(driver_version)

    async def prune(self) -> None:
        if self._mirror is not None:
            try:
                await self._mirror.prune()
            except (DriverFilesError, OSError) as error:
                log.warning("driver_files_not_removed", error=str(error))

    def vcuda_obstacle(self) -> str | None:
        """Why containers don't get vcuda's library; None if they get it."""
        if self._made is not None and self._made.share_dir is not None:
            return None
        return self._vcuda_error or self._error or "the driver's files are not mirrored yet"

    def trouble(self) -> str | None:
        """Why new containers may not see the driver; None if they see it."""
        if self._without_driver:
            return None
        if self._undecided:
            return f"it is not known whether containers need mounts of the driver's files: {self._silence or self.access.why}"
        if not self.access.mounted:
            return None
        if self._error is not None:
            return f"new containers don't see this driver: {self._error}"
        return self._missing and f"CUDA can't start in containers: {self._missing}"

    # -- the container runtime ---------------------------------------------------------------------------------------------

    async def _ask_runtime(self) -> None:
        if self._without_driver or self._setting == "toolkit":
            return
        try:
            async with asyncio.timeout(RUNTIME_SECONDS):
                self._runtimes = await self._ask()
            self._silence = None
        except (CriError, TimeoutError) as error:
            silence = str(error) or f"the container runtime did not answer within {RUNTIME_SECONDS:g} s"
            if self._runtimes is None and silence != self._silence:
                log.warning("driver_files_undecided", error=silence, remedy="set cri.socket, or container.driver_files")
            self._silence = silence
        if (access := self.access) != self._logged and not self._undecided:
            log.info("driver_files", way="mounts" if access.mounted else "toolkit", because=access.why)
            self._logged = access

    # -- the mirror --------------------------------------------------------------------------------------------------------

    def _wanted(self) -> bool:
        """Whether a mirror is needed. Until it is decided how containers get the driver's files, only vcuda's library needs a mirror."""
        mounted = self.access.mounted and not self._undecided
        supplied = is_supplied(self._settings.container.driver_whole_dir)
        return self._settings.vcuda.library_path is not None or (mounted and not supplied)

    def _look_at_device_nodes(self) -> None:
        """Logs missing device nodes. NVIDIA's container toolkit creates them when a container starts; without the toolkit the host must
        create them."""
        root = self._settings.container.device_root
        exempt = self._simulated or not self.access.mounted or (root / WSL_NODE).exists()
        missing = [] if exempt else [f"{root}/{name}" for name in CONTROL_NODES if not (root / name).exists()]
        text = (
            f"{' and '.join(missing)} missing; run `nvidia-modprobe -u -c 0`, or start nvidia-persistenced" if missing else None
        )
        if text is not None and text != self._missing:
            log.warning("device_nodes_missing", error=text)
        self._missing = text

    def _is_mirrored(self, version: str) -> bool:
        made = self._made
        if made is None or made.driver_version != version or self._error or self._vcuda_error:
            return False
        return all(folder.is_dir() for folder in (made.share_dir, made.whole_dir) if folder is not None)

    async def _mirror_driver(self, version: str) -> None:
        vcuda, container = self._settings.vcuda, self._settings.container
        try:
            if self._mirror is None:
                self._mirror = DriverMirror(
                    msgspec.structs.replace(vcuda, client_path=await self._gpu_client()),
                    share_dir=container.driver_share_dir,
                    whole_dir=container.driver_whole_dir,
                )
            self._made = made = await self._mirror.ensure(version)
        except (DriverFilesError, InputError, OSError) as error:
            self._error = self._report(str(error), self._error, "new containers don't get the files of this driver")
            return
        if self.access.mounted and not container.driver_whole_dir.is_dir():
            lacking = f"{vcuda.volume_conf} has no volume {WHOLE!r}, which containers get"
            self._error = self._report(lacking, self._error, "new containers don't see the driver")
            return
        self._error = None
        if made.share_error is not None and vcuda.library_path is not None:
            self._vcuda_error = self._report(made.share_error, self._vcuda_error, "the backend vcuda can't be used")
            return
        self._vcuda_error = None
        for problem in made.problems:
            log.warning("driver_files_incomplete", problem=problem)

    def _report(self, error: str, former: str | None, consequence: str) -> str:
        if error != former:
            log.error("driver_files_not_mirrored", error=error, consequence=consequence)
        return error

    async def _gpu_client(self) -> Path | None:
        vcuda = self._settings.vcuda
        if vcuda.library_path is None or vcuda.client_path is not None:
            return vcuda.client_path
        return await asyncio.to_thread(build_client, self._settings.checkpoint.library_dir)
