"""Enforcement: asks each backend whether this node can use it, and chooses one, as the agent does."""

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Final

from gpumgr.cli.agent_client import STATE, AgentClient, read_state
from gpumgr.cli.examination.examine import PEER_SECONDS, CheckResult, aside, error, ok, skipped, warning
from gpumgr.cli.examination.folders import backend_words
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.cli.gpu_labels import excess_sentence, gpus_of
from gpumgr.common.errors import GpumgrError, NvmlError
from gpumgr.common.proc import mount_of
from gpumgr.driver.hardware import Hardware
from gpumgr.enforcement.backend import NO_MECHANISM, Backend, MechanismChoice, choose_mechanisms
from gpumgr.enforcement.container_files import unbounded
from gpumgr.enforcement.hami_core.backend import FOLDER as HAMI_CORE_FOLDER
from gpumgr.enforcement.limiter.backend import FOLDER as LIMITER_FOLDER
from gpumgr.enforcement.limiter.libraries import ARBITER, LIBRARY, library_path
from gpumgr.kube.cache import NoPods
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.settings import Settings
from gpumgr.settings.profile import VERSION, hami_core_library

IF_HUNG: Final = "check whether the driver answers (`nvidia-smi`) and whether the file system does"
_BOUND: Final = (
    "run the agent as root; in a pod mount run_dir with Bidirectional propagation from a shared mount of the host (the chart does); then "
    "restart these containers"
)


class NodeBackends:
    """The agent's backends, each asked once for all checks. `in_pod`: the command runs in a pod, as the agent would."""

    def __init__(self, settings: Settings, gpus: SharedNvml, hardware: Hardware, *, in_pod: bool) -> None:
        self._settings, self._gpus, self._hardware, self._in_pod = settings, gpus, hardware, in_pod
        self._asked: asyncio.Task[MechanismChoice] | None = None

    async def choice(self) -> MechanismChoice:
        if self._asked is None:
            self._asked = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asked)

    async def _ask(self) -> MechanismChoice:
        # MPS records its protocol in its folder; a check must not do so in the real one.
        with tempfile.TemporaryDirectory(prefix="gpumgr-doctor-") as scratch:
            trial = Path(scratch), self._gpus.nvml
            enforcement = NodeEnforcement(self._settings, self._hardware, NoPods(), None, trial)
            backends = {name: each for name, each in enforcement.backends().items() if name != "mps-open"}
            asked = await asyncio.gather(*map(self._obstacle, backends.values()))
            await enforcement.close()
        strengths = {name: each.limits for name, each in backends.items()}
        return choose_mechanisms(self._settings.enforcement.backend, dict(zip(backends, asked, strict=True)), strengths)

    async def _obstacle(self, backend: Backend) -> str | None:
        try:
            if backend.name == "nvml-memory":
                return await self._gpus.ask(backend.unavailable)
            return await backend.unavailable()
        except (NvmlError, OSError) as exception:
            return str(exception)

    async def look_at(self, name: str) -> CheckResult:
        """Whether this node can use the backend. The result is an error only if the settings name the backend."""
        words = backend_words(self._settings)
        if not {name, "auto"} & words and not (name == "mps" and "nvml-memory" in words):
            return skipped(f"not used: enforcement.backend is {' and '.join(sorted(words))}")
        obstacle = (await self.choice()).obstacles.get(name)
        if obstacle is None:
            return ok("this node can use it")
        sentence, _, remedy = obstacle.partition("; ")
        if name in words:
            return error(sentence, remedy or "repair that, or choose another enforcement.backend")
        return skipped(f"this node can't use it: {obstacle}")

    async def look_at_limiter(self) -> CheckResult:
        """The package's libraries, and whether a container can fill enforcement.run_dir through the files (pages) that it shares with the
        agent."""
        found = await self.look_at("limiter")
        if found.state != "ok":
            return found
        return await self._bounded(f"{LIBRARY} and {ARBITER} in {library_path(LIBRARY).parent}", LIMITER_FOLDER, "pages")

    async def look_at_hami_core(self) -> CheckResult:
        """The library, and whether a container can fill enforcement.run_dir through its file for HAMi-core (region)."""
        found, (path, sha256) = await self.look_at("hami-core"), hami_core_library(self._settings)
        if found.state != "ok" or path is None or sha256 is None:
            return found
        about = f"{path}, SHA-256 {sha256[:12]}…{await aside(lambda: _version(path))}"
        return await self._bounded(about, HAMI_CORE_FOLDER, "regions")

    async def _bounded(self, about: str, folder: str, files: str) -> CheckResult:
        """ok with `about`, unless a container can fill enforcement.run_dir through its files there."""
        if (fault := await aside(lambda: self._unbounded(folder, files))) is None:
            return ok(about)
        run_dir = self._settings.enforcement.run_dir
        return warning(f"{about}; {fault}: a container can fill {run_dir} (enforcement.run_dir)", _BOUND)

    def _unbounded(self, folder: str, files: str) -> str | None:
        run_dir = self._settings.enforcement.run_dir
        with contextlib.suppress(OSError):  # only root may list it
            if plain := unbounded(run_dir / folder):
                return f"the {files} of {len(plain)} containers are in plain folders, such as {run_dir / folder / plain[0]}"
        if self._in_pod:
            mount = mount_of((self._hardware.proc_root / "self/mountinfo").read_text(), run_dir)
            if mount is None or not mount.shared:
                return f"mounts below {run_dir} do not reach the host, so {files} are in plain folders"
        return None

    async def look_at_choice(self) -> CheckResult:
        choice = await self.choice()
        try:
            seen = (await self._gpus.snapshot()).gpus
        except NvmlError:
            seen = ()
        return judge_choice(self._settings.enforcement.backend, choice, choice.describe(seen))


async def look_at_bursts(settings: Settings, *, timeout_seconds: float = PEER_SECONDS) -> CheckResult:
    """By how much the memory limits of containers exceed the memory of the GPUs, according to the agent of this node."""
    if not settings.enforcement.memory_burst:
        return skipped("not used: enforcement.memory_burst is off")
    try:
        async with AgentClient(settings.http.socket) as agent:
            state = read_state(await agent.get(STATE, timeout_seconds=timeout_seconds))
    except GpumgrError as exception:
        return skipped(str(exception))
    gpus = gpus_of(state.gpus)
    found = [sentence for row in state.gpus if (sentence := excess_sentence(row, gpus.label(row.name)))]
    return ok("; ".join(found) or "the memory limits of containers exceed the memory of no GPU")


def judge_choice(setting: str, choice: MechanismChoice, described: str) -> CheckResult:
    """`setting`: enforcement.backend; `described`: the choice as text. Why another backend can't be used is in that backend's
    own check."""
    lost = [f"{name} ({choice.obstacles[name]})" for name in sorted(choice.mechanisms) if name in choice.obstacles]
    if lost:
        return error(
            f"enforcement.backend is {setting}, which this node can't use: {', '.join(lost)}",
            "repair that, or choose another backend; until then containers that share a GPU are refused at their start",
        )
    if choice.mechanisms == NO_MECHANISM:
        remedy = "set enforcement.backend to auto" if setting != "auto" else "repair what one of the backends above lacks"
        return warning(f"no backend enforces the limits of shares (enforcement.backend is {setting})", remedy)
    return ok(described)


def _version(library: Path) -> str:
    """The version that `gpumgr install library` stored beside the library; empty for a library in another folder."""
    try:
        text = library.with_name(VERSION).read_text(errors="replace")
    except OSError:
        return ""
    return f", version {text.strip()[:200]}"
