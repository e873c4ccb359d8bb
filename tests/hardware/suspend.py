"""Moves a tenant's memory out of this machine's first GPU and back while another tenant works, as often as four minutes allow. Run it as a
module, as root; it needs gcc and unshare. usage: suspend [GIB:ROUNDS...]

By default it makes 15 rounds of 4 GiB and 5 of 36 GiB. 20 rounds of both do not fit in four minutes: on an H200 with driver 580.159.04 one
round of 36 GiB takes 29 s (22.7 s out, 6.3 s back) and one of 4 GiB 4.1 s (2.9 s out, 1.2 s back), so 20 of both take 11 minutes.
`suspend 4:20` and `suspend 36:6` fit.

Each row is printed at once: what the driver's steps took, how long a kernel took that asked for the resume, and the rate of the other
tenant during the steps. The limiter's library is loaded in both, from the sources here.
"""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from tests.hardware.limiter_measure import PagedTenant, Pages, first_gpu, may_mount
from tools.limiter import LIBRARY, compile_library

_TENANT = (sys.executable, str(Path(__file__).with_name("tenant.py")))
_SECONDS = 230
#: About 61 and 145 s of moves on an H200, and the first launches and checks of the memory.
_ROUNDS = ((4, 15), (36, 5))
_STEP_BYTES = 1 << 30
_STEPS = ("lock", "checkpoint", "restore", "unlock", "on demand", "other")


class SuspendError(Exception):
    """A step failed, or the tenant's memory is not what it was."""


class _Suspension:
    def __init__(self, folder: Path) -> None:
        compile_library(LIBRARY, folder)
        mounts, uuid = may_mount(), first_gpu()
        if mounts:
            Path("/etc/gpumgr").mkdir(exist_ok=True)
        self._pages = Pages(folder / "tenant-pages", uuid)
        pages = (self._pages, Pages(folder / "other-pages", uuid), None)
        tenants = [
            PagedTenant(name, each, folder / LIBRARY, mounts=mounts, command=_TENANT)
            for name, each in zip(("tenant", "other", "agent"), pages, strict=True)
        ]
        self._tenant, self._other, self._agent = tenants

    def start(self) -> float:
        """The other tenant's launches per second while the tenant does nothing."""
        for tenant in (self._tenant, self._other):
            _done(tenant, "init")
        _done(self._other, "work 1")  # the first one loads the code
        return _rate(_done(self._other, "work 2"))

    def hold(self, gib: int, byte: int) -> None:
        for command in ("free", f"grab {_STEP_BYTES} {gib * _STEP_BYTES}", f"fill {byte}", "work 0"):
            _done(self._tenant, command)

    def move(self, byte: int, rate: float, pool: ThreadPoolExecutor) -> Mapping[str, float]:
        """Seconds by step, and the other tenant's rate in per cent."""
        self._pages.suspend(1)
        time.sleep(0.1)
        took = {"lock": self._step("lock")}
        working = pool.submit(_done, self._other, "work 1")
        took["checkpoint"] = self._step("checkpoint")
        took["other"] = 100 * _rate(working.result()) / rate
        begun = time.monotonic()
        asking = pool.submit(_done, self._tenant, "work 0")
        while not self._pages.resume_requested():
            if asking.done() or time.monotonic() > begun + 10:
                raise SuspendError("a launch by a suspended tenant did not ask for its resume")
            time.sleep(0.001)
        took |= {step: self._step(step) for step in ("restore", "unlock")}
        self._pages.suspend(0)
        asking.result()
        took["on demand"] = time.monotonic() - begun
        if wrong := _done(self._tenant, f"check {byte}")["wrong"]:
            raise SuspendError(f"{wrong} GiB of the tenant's memory are not what they were")
        return took

    def _step(self, name: str) -> float:
        return float(_done(self._agent, f"{name} {self._tenant.pid}")["seconds"])

    def close(self) -> None:
        for tenant in (self._tenant, self._other, self._agent):
            tenant.kill()


def _done(tenant: PagedTenant, command: str) -> Mapping[str, Any]:
    """The answer. Raises SuspendError."""
    answer = tenant.ask(command, 90)
    if answer.get("result") != 0:
        raise SuspendError(f"{tenant.name}, {command}: {answer.get('error', answer)}")
    return answer


def _rate(worked: Mapping[str, Any]) -> float:
    return float(worked["launches"] / worked["seconds"])


def measured(folder: Path, rounds: Sequence[tuple[int, int]], deadline: float) -> bool:
    """Prints a row for each pair of GiB and number of rounds. Whether all rounds were made until `deadline`, a time of time.monotonic.
    Raises SuspendError."""
    suspension = _Suspension(folder)
    made: list[Mapping[str, float]] = []
    with ThreadPoolExecutor(2) as pool:
        try:
            rate = suspension.start()
            for gib, wanted in rounds:
                made = []
                suspension.hold(gib, byte=gib)
                longest = 0.0
                while len(made) < wanted and time.monotonic() + longest < deadline:
                    begun = time.monotonic()
                    made.append(suspension.move(gib, rate, pool))
                    longest = max(longest, time.monotonic() - begun)
                print(f"{gib} GiB, {len(made)} of {wanted} rounds:", _row(made), flush=True)
        finally:
            suspension.close()  # before the end of the pool: its threads wait for answers until the tenants end
    return len(made) == wanted


def _row(made: Sequence[Mapping[str, float]]) -> str:
    """The median and the largest time of each step; the median and the smallest rate of the other tenant."""
    parts = []
    for step in _STEPS if made else ():
        values = [took[step] for took in made]
        unit, worst = ("%", min(values)) if step == "other" else ("s", max(values))
        parts.append(f"{step} {median(values):.2f} ({worst:.2f}) {unit}")
    return ", ".join(parts)


def main(words: Sequence[str]) -> int:
    """1 if a step fails, memory is lost, or the time is over."""
    pairs = [word.split(":") for word in words]
    rounds = [(int(gib), int(number)) for gib, number in pairs] or _ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        try:
            return int(not measured(Path(folder), rounds, time.monotonic() + _SECONDS))
        except SuspendError as error:
            print(error, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
