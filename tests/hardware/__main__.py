"""`python -m tests.hardware`: measures each mechanism on this machine's first GPU and writes results.json and results.md.

As root, on a machine without other GPU programs. It resets no GPU, and leaves MIG and, without --exclusive, the compute mode as they
are.
"""

import argparse
import asyncio
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.hardware.measure import MechanismResult, measure
from tests.hardware.node import TENANT, open_hardware_node
from tests.hardware.report import as_json, as_markdown

#: nvml-memory alone would leave cores to MPS, so it is measured with a control program that does not exist.
MECHANISMS = ("none", "mps", "hami-core", "nvml-memory")
Settings = dict[str, dict[str, object]]


def main(words: Sequence[str]) -> int:
    """The exit status: 1 if a mechanism that this machine could use was not measured to the end."""
    options = options_of(words)
    os.environ.update(options.environ)
    machine = _machine(options)
    rate = asyncio.run(_unlimited_rate(options, machine))
    if rate is None:
        print(f"this machine has no GPU that a CUDA program can use: {machine['cuda']}", file=sys.stderr)
        return 1
    results: list[MechanismResult] = []
    for mechanism in options.mechanisms:
        print(f"hardware: {mechanism}", file=sys.stderr, flush=True)
        results.append(asyncio.run(measured(mechanism, options, rate)))
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(as_json(machine, results), encoding="utf-8")
        (options.out / "results.md").write_text(as_markdown(machine, results), encoding="utf-8")
    print(as_markdown(machine, results))
    return int(any(result.obstacle is not None for result in results))


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hardware", description=__doc__)
    parser.add_argument(
        "mechanisms", nargs="*", type=_mechanism, default=MECHANISMS, metavar="MECHANISM", help=f"of {', '.join(MECHANISMS)}"
    )
    parser.add_argument("--out", type=Path, default=Path("build/hardware"), help="folder of the results (build/hardware)")
    parser.add_argument("--seconds", type=_seconds, default=5, help="how long each tenant works (5)")
    parser.add_argument("--hami-core", type=_file, help="libvgpu.so; without it hami-core is not measured")
    parser.add_argument("--mps-control", default="nvidia-cuda-mps-control", help="NVIDIA's control program")
    parser.add_argument("--exclusive", action="store_true", help="let MPS set the compute mode EXCLUSIVE_PROCESS for a while")
    parser.add_argument("--sim", help="try the program itself: a simulated node for the agent, for a machine without a GPU")
    parser.add_argument(
        "--environ",
        action="append",
        type=_variable,
        default=[],
        metavar="NAME=VALUE",
        help="more environment for agent and tenants",
    )
    return parser.parse_args(words)


def _mechanism(word: str) -> str:
    if word not in MECHANISMS:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(MECHANISMS)}")
    return word


def _seconds(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} must be at least 1")
    return int(word)


def _file(word: str) -> Path:
    if not Path(word).is_file():
        raise argparse.ArgumentTypeError(f"{word} is no file")
    return Path(word)


def _variable(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=VALUE")
    return name, value


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    """Facts about the machine."""
    return {
        "kernel": platform.release(),
        "cgroup": "v2" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "v1",
        "gpu": _smi("name"),
        "driver": _smi("driver_version"),
        "mps": shutil.which(options.mps_control) or "not found",
        "hami_core": hashlib.sha256(options.hami_core.read_bytes()).hexdigest()[:12] if options.hami_core else "not given",
    }


async def _unlimited_rate(options: argparse.Namespace, machine: dict[str, Any]) -> float | None:
    """Kernels per second of a tenant without limits; None if it can't use a GPU. It is added to the facts, or else the reason."""
    commands = ("init", "info", f"work {options.seconds}")
    tenant = await asyncio.create_subprocess_exec(
        sys.executable, str(TENANT), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await tenant.communicate("".join(f"{command}\n" for command in commands).encode())
    answers = [json.loads(line) for line in output.splitlines()]
    failed = [answer["error"] for answer in answers if answer["result"] != 0]
    if failed or len(answers) < len(commands):
        machine["cuda"] = failed[0] if failed else errors.decode(errors="replace").strip().rpartition("\n")[2]
        return None
    rate: float = answers[-1]["launches"] / answers[-1]["seconds"]
    machine |= {"multiprocessors": answers[0]["multiprocessors"], "kernels_per_second": round(rate, 1)}
    return rate


def _smi(field: str) -> str:
    """One field of the first GPU, as nvidia-smi prints it."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({type(error).__name__})"


async def measured(mechanism: str, options: argparse.Namespace, rate: float) -> MechanismResult:
    """Raises no Exception: what prevents the measurement is the result's obstacle."""
    if mechanism == "hami-core" and options.hami_core is None:
        return MechanismResult(mechanism=mechanism, obstacle="no library was given: --hami-core FILE")
    arguments = ["--sim", options.sim] if options.sim else []
    result = MechanismResult(mechanism=mechanism)
    try:
        with tempfile.TemporaryDirectory(prefix="gpumgr-hw-", dir="/tmp") as folder:
            async with open_hardware_node(Path(folder), _settings(mechanism, options), arguments=arguments) as node:
                await node.start({})
                try:
                    result = await measure(node, mechanism, rate=rate, seconds=options.seconds)
                finally:
                    await node.until_mps_ended()
    except Exception as error:  # the other mechanisms are measured all the same
        reasons = (result.obstacle, str(error) or repr(error))
        result = replace(result, obstacle="; ".join(reason for reason in reasons if reason))
    return result


def _settings(mechanism: str, options: argparse.Namespace) -> Settings:
    control = options.mps_control if mechanism == "mps" else "no-mps"
    settings: Settings = {
        "enforcement": {"backend": mechanism, "orphan_grace_seconds": 1},
        "mps": {"control_program": control, "exclusive_process": options.exclusive, "idle_seconds": 1},
    }
    if mechanism == "hami-core":
        library = options.hami_core.resolve()
        settings["hami_core"] = {
            "library_path": str(library),
            "library_sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        }
    return settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
