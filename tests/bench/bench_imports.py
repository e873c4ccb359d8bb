"""What the agent is before it has done anything: `python -m tests.bench.bench_imports [--rounds N]` prints one JSON object.

`gpumgr run` imports its command, and the API server's library when it connects. The interpreter alone is measured beside it; both in
processes of their own, bytecode there.
"""

import subprocess
import sys
from statistics import median
from typing import Any, Final

from tests.bench import figures

#: As the command does it.
AGENT: Final = """
from gpumgr.cli.daemon import lean_imports
with lean_imports():
    import gpumgr.cli.run, gpumgr.kube.library
gpumgr.kube.library.kubeconfig_loader()
"""
NOTHING: Final = "import sys"
_TELL: Final = """
import sys, time; began = time.perf_counter()
{imports}
seconds = time.perf_counter() - began
resident = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
print(len(sys.modules), resident, seconds)
"""


def footprint(imports: str) -> tuple[int, float, float]:
    """Modules, resident MiB, seconds of the imports."""
    command = [sys.executable, "-c", _TELL.format(imports=imports)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return int(told[0]), int(told[1]) / 1024, float(told[2])


def measure(rounds: int) -> dict[str, Any]:
    """Medians of `rounds`."""
    footprint(AGENT)  # bytecode and page cache
    agent, nothing = zip(*((footprint(AGENT), footprint(NOTHING)) for _ in range(rounds)), strict=True)
    ours, bare = _middle(agent), _middle(nothing)
    return {"agent": ours, "interpreter": bare, "beyond_interpreter_mib": round(ours["resident_mib"] - bare["resident_mib"], 1)}


def _middle(taken: tuple[tuple[int, float, float], ...]) -> dict[str, float | int]:
    modules, mebibytes, seconds = (median(column) for column in zip(*taken, strict=True))
    return {"modules": int(modules), "resident_mib": round(mebibytes, 1), "seconds": round(seconds, 4)}


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=7)
