"""Other device plugins for the same GPUs, while the agent runs: the log says when one is there, and when it is gone."""

import asyncio
from pathlib import Path
from typing import Final, NoReturn

import structlog

from gpumgr.deviceplugin.other_plugins import answering, gpu_manager_answers, problem_and_remedy

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 10.0


class Neighbours:
    """`folder`: the kubelet's folder of device plugins. Nothing is done about them: who is to go is the operator's choice. But we don't
    come to gpu-manager's place while it is there: the resources have the same names, so that ours would take its place at the kubelet."""

    def __init__(self, folder: Path, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._folder, self._look_seconds = folder, look_seconds
        self._told: tuple[Path, ...] = ()

    async def gpu_manager(self) -> str | None:
        """Why nothing may be registered yet, with what to do; None if gpu-manager does not run."""
        return await asyncio.to_thread(gpu_manager_answers, self._folder)

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._look_seconds)

    async def look(self) -> None:
        found = await asyncio.to_thread(answering, self._folder)
        if found == self._told:
            return
        self._told = found
        if found:
            problem, remedy = problem_and_remedy(found)
            log.warning("gpus_given_out_twice", problem=problem, remedy=remedy)
        else:
            log.info("gpus_given_out_once", reason=f"no other plugin for NVIDIA's GPUs answers in {self._folder} any more")
