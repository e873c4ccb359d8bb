"""Finds containers with an image of a newer CUDA than the library supports, by what the image declares in its environment.

NVIDIA's images set CUDA_VERSION (`12.4.1`) and NVIDIA_REQUIRE_CUDA (`cuda>=12.4 brand=tesla,driver>=470 ...`). The environment is the
tenant's: it may have any size and content.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.aio import DaemonCalls

#: libcudart asks cuGetProcAddress from 11.3 on, and gets the library's 32-bit functions of CUDA 2.
_NEWEST: Final = (11, 2)
_DECLARED: Final = re.compile(
    rb"(?:^|\0)(?:CUDA_VERSION=|NVIDIA_REQUIRE_CUDA=[^\0]*?\bcuda>=?)(\d{1,3})(?:\.(\d{1,3}))?(?![0-9])", re.ASCII
)
_READ_SECONDS: Final = 0.2


def newer_cuda(environment: bytes) -> str | None:
    """The newest CUDA version that `environment` (`NAME=value` with NULs between) declares, such as "12.4"; None if none of them is
    newer than the library supports. What is no version is ignored."""
    newest = max(((int(major), int(minor or 0)) for major, minor in _DECLARED.findall(environment)), default=_NEWEST)
    return None if newest <= _NEWEST else f"{newest[0]}.{newest[1]}"


class ImageCheck:
    """`environment_of` returns the environment of a process. A tenant can make it hang, so it is called on a thread of its own."""

    def __init__(self, environment_of: Callable[[int], bytes]) -> None:
        self._environment_of, self._calls = environment_of, DaemonCalls("vcuda_environment")
        #: (container id, whether it uses a GPU) -> what was found. What is read at its start may still be the runtime's environment.
        self._found: dict[tuple[str, bool], Finding | None] = {}

    async def findings(self, running: Sequence[RunningContainer]) -> list[Finding]:
        """`running`: all running containers of the backend."""
        before, self._found = self._found, {}
        for each in running:
            container, key = each.container, (each.container.id, bool(each.gpu_pids))
            if key in before:
                self._found[key] = before[key]
            elif container.pid is not None and container.pid in each.pids:
                read = partial(self._environment_of, container.pid)
                with suppress(TimeoutError):  # the next call tries again
                    self._found[key] = _finding(each, await self._calls.call(read, timeout_seconds=_READ_SECONDS))
        return [finding for finding in self._found.values() if finding is not None]


def _finding(running: RunningContainer, environment: bytes) -> Finding | None:
    if (cuda := newer_cuda(environment)) is None:
        return None
    message = (
        f"the image of {running.tenant.describe()} has CUDA {cuda}, and the backend vcuda supports 11.2 and older: its programs fail to "
        "free memory, and sizes are cut to 32 bits. Use an image with CUDA 11.2 or older, or another backend (enforcement.overrides)"
    )
    return Finding(allocation=running.tenant.allocation, code="broken", message=message)
