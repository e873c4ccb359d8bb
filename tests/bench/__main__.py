"""`python -m tests.bench`: every benchmark, one after another, into build/bench.json; their table on standard output.

`--pods` adds what needs a real kubelet or kube-scheduler (root). `--only MODULE` measures that one again and takes the others' figures
from the last run. `--document FILE` measures nothing: it puts the table of the last run into FILE.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench import table

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "build" / "bench.json"
#: NAME for the module tests.bench.bench_NAME; each prints one JSON object.
BENCHMARKS = (
    *("agent", "evaluators", "metrics", "prestart", "registrations", "usage", "regions", "launches", "pages", "paint", "writer"),
    *("dra", "replicas", "replica_filter", "quotas", "bodies", "requests", "waiting", "scheduler"),
)
#: A load above this is that of other programs, which then determine p99.
QUIET_LOAD = 0.5


def measure(pods: bool, only: str | None = None) -> dict[str, Any]:
    """All figures of one run. `only` this module's are new: the others' are those of the last run."""
    load = os.getloadavg()[0]
    if load > QUIET_LOAD * (os.cpu_count() or 1):
        print(f"the machine is busy (load {load:.1f}): read p50, mistrust p99", file=sys.stderr)
    figures: dict[str, Any] = json.loads(RESULTS.read_text()) if only else {}
    figures["machine"] = machine()
    for name in BENCHMARKS:
        if only not in (None, name):
            continue
        print(f"bench: {name}", file=sys.stderr)
        figures[name] = json.loads(_output([sys.executable, "-m", f"tests.bench.bench_{name}"]))
    if pods:
        figures |= on_a_cluster()
    figures["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    return figures


def on_a_cluster() -> dict[str, Any]:
    """What needs real parts of Kubernetes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "tests.e2e.bench_cluster", "--output", str(output)]
        subprocess.run(command, check=True, cwd=PROJECT, stdout=sys.stderr)
        document: dict[str, Any] = json.loads(output.read_text())
        return document


def machine() -> dict[str, Any]:
    """What was measured on."""
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    model = next((text.strip() for key, text in facts.items() if key.strip() == "model name"), platform.machine())
    filesystem = _output(["df", "--output=fstype", tempfile.gettempdir()]).split()[-1]
    return {
        "cpus": os.cpu_count(),
        "cpu_model": model,
        "python": platform.python_version(),
        "filesystem": filesystem,
        "load_before": round(os.getloadavg()[0], 1),
    }


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, cwd=PROJECT, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", action="store_true", help="what needs a real kubelet or kube-scheduler besides (root)")
    parser.add_argument("--only", choices=BENCHMARKS, help="this one again, the others as in the last run")
    parser.add_argument("--document", type=Path, metavar="FILE", help="put the table of the last run into FILE")
    arguments = parser.parse_args()
    if arguments.document is not None:
        table.put_into(arguments.document, table.markdown(json.loads(RESULTS.read_text())))
        return
    if arguments.only is not None and not RESULTS.exists():
        parser.error(f"--only adds to the figures of an earlier run, and {RESULTS} is not there")
    figures = measure(arguments.pods, arguments.only)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    print(table.markdown(figures))


if __name__ == "__main__":
    main()
