"""Asks each backend whether this node can use it, and chooses one as the agent does."""

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from gpumgr.agent.api import NodeState
from gpumgr.cli.agent_client import STATE, AgentClient, decoded, excess_sentence, gpus_of
from gpumgr.cli.examination import PEER_SECONDS, CheckResult, aside, error, ok, skipped, warning
from gpumgr.cli.examination.folders import backend_words
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.common.errors import GpumgrError, NvmlError
from gpumgr.driver import Hardware
from gpumgr.enforcement.backend import NO_MECHANISM, Backend, MechanismChoice, choose_mechanisms
from gpumgr.kube.cache import NoPods
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.settings import Settings
from gpumgr.settings.profile import VERSION, hami_core_library

IF_HUNG: Final = "check whether the driver (`nvidia-smi`) and the file systems (`df`) answer"


class NodeBackends:
    """The agent's backends, each asked once for all checks."""

    def __init__(self, settings: Settings, gpus: SharedNvml, hardware: Hardware) -> None:
        self._settings, self._gpus, self._hardware = settings, gpus, hardware
        self._asked: asyncio.Task[MechanismChoice] | None = None

    async def choice(self) -> MechanismChoice:
        if self._asked is None:
            self._asked = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asked)

    async def _ask(self) -> MechanismChoice:
        # A check must change nothing. In the agent's folders, the backend mps would store the protocol that it chooses.
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
        """The result is an error only if the settings name the backend."""
        words = backend_words(self._settings)
        if not {name, "auto"} & words and not (name == "limiter" and "nvml-memory" in words):
            return skipped(f"not used: enforcement.backend is {' and '.join(sorted(words))}")
        obstacle = (await self.choice()).obstacles.get(name)
        if obstacle is None:
            return ok(await aside(_library_text, self._settings) if name == "hami-core" else "this node can use it")
        sentence, _, remedy = obstacle.partition("; ")
        if name in words:
            return error(sentence, remedy or "repair that, or choose another enforcement.backend")
        return skipped(f"this node can't use it: {obstacle}")

    async def look_at_choice(self) -> CheckResult:
        """The result names only backends of the setting: the other ones have their own checks."""
        setting = self._settings.enforcement.backend
        if self._hardware.simulated and backend_words(self._settings) == {"auto"}:
            return skipped("on a simulated node enforcement.backend auto limits nothing")
        choice = await self.choice()
        if lost := [f"{name} ({choice.obstacles[name]})" for name in sorted(choice.mechanisms) if name in choice.obstacles]:
            return error(
                f"enforcement.backend is {setting}, which this node can't use: {', '.join(lost)}",
                "repair that, or choose another backend; until then containers that share a GPU are refused at their start",
            )
        if choice.mechanisms == NO_MECHANISM:
            remedy = "set enforcement.backend to auto" if setting != "auto" else "repair what one of the backends above lacks"
            return warning(f"no backend enforces the limits of shares (enforcement.backend is {setting})", remedy)
        try:
            seen = (await self._gpus.snapshot()).gpus
        except NvmlError:
            seen = ()
        return ok(choice.describe(seen))


async def look_at_bursts(settings: Settings, *, timeout_seconds: float = PEER_SECONDS) -> CheckResult:
    """By how much the memory limits of containers exceed the memory of the GPUs, as this node's agent reports."""
    try:
        async with AgentClient(settings.http.socket) as agent:
            state = decoded(await agent.get(STATE, timeout_seconds=timeout_seconds), NodeState)
    except GpumgrError as exception:
        return skipped(str(exception))
    gpus = gpus_of(state.gpus)
    found = [sentence for row in state.gpus if (sentence := excess_sentence(row, gpus.label(row.name)))]
    return ok("; ".join(found) or "on each GPU the memory limits of the containers are within the GPU's memory")


def _library_text(settings: Settings) -> str:
    """Which library of HAMi-core containers get, and the version that `gpumgr install library` stored with it."""
    path, sha256 = hami_core_library(settings)
    assert path is not None, "the backend can be used"
    assert sha256 is not None, "the backend can be used"
    try:
        version = f", version {path.with_name(VERSION).read_text(errors='replace').strip()[:200]}"
    except OSError:
        version = ""
    return f"{path}, SHA-256 {sha256[:12]}…{version}"
