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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.hardware.measure import TORCH_LOADS, MechanismResult, launches_per_second, measure
from tests.hardware.node import TENANT, TORCH_TENANT, open_hardware_node
from tests.hardware.report import as_json, as_markdown

#: In the order in which they are measured until the time is over. nvml-memory leaves cores to the limiter.
MECHANISMS = ("limiter", "mps", "hami-core", "nvml-memory", "none")
#: How long a tenant works at least, where a library regulates its share slowly.
SLOW_SECONDS = {"hami-core": 20}
_SECONDS = 4
Settings = dict[str, dict[str, object]]


def main(words: Sequence[str]) -> int:
    """The exit status: 1 if a mechanism that this machine could use was not measured to the end."""
    options = options_of(words)
    if os.geteuid() != 0 and options.sim is None:
        print("MPS and cgroups need root", file=sys.stderr)
        return 1
    deadline = time.monotonic() + 60 * options.minutes
    os.environ.update(options.environ)
    machine = _machine(options)
    rates = _unlimited_rates(options, machine)
    if rates is None:
        print(f"this machine has no GPU that a CUDA program can use: {machine['cuda']}", file=sys.stderr)
        return 1
    results: list[MechanismResult] = []
    for mechanism in options.mechanisms:
        print(f"hardware: {mechanism}", file=sys.stderr, flush=True)
        results.append(asyncio.run(measured(mechanism, options, rates, deadline)))
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
    slow = ", ".join(f"{seconds} s with {mechanism}" for mechanism, seconds in SLOW_SECONDS.items())
    parser.add_argument("--seconds", type=_at_least_one, help=f"how long each tenant works (4 s, {slow})")
    parser.add_argument("--minutes", type=_at_least_one, default=8, help="time of the whole run, which no mechanism exceeds (8)")
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


def _at_least_one(word: str) -> int:
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


def _unlimited_rates(options: argparse.Namespace, machine: dict[str, Any]) -> dict[str, float] | None:
    """Launches per second of tenants without limits, by load; with PyTorch's loads where it can be imported. None if no tenant can use a
    GPU. They are added to the facts, or else the reason."""
    seconds = options.seconds or _SECONDS
    try:
        answers = _answers(TENANT, ("init", f"work {seconds}"))
    except RuntimeError as error:
        machine["cuda"] = str(error)
        return None
    machine["multiprocessors"] = answers[0]["multiprocessors"]
    rates = {"work": launches_per_second(answers[1])}
    try:
        init, *worked = _answers(TORCH_TENANT, ("init", *(f"{load} {seconds}" for load in TORCH_LOADS)))
    except RuntimeError as error:
        machine["torch"] = f"not measured: {error}"
    else:
        machine["torch"] = init["version"]
        rates |= {load: launches_per_second(answer) for load, answer in zip(TORCH_LOADS, worked, strict=True)}
    machine["launches_per_second"] = {load: round(rate, 1) for load, rate in rates.items()}
    return rates


def _answers(program: Path, commands: Sequence[str]) -> list[dict[str, Any]]:
    """The answers of a tenant without limits. Raises RuntimeError if a command fails or the program ends."""
    text = "".join(f"{command}\n" for command in commands)
    done = subprocess.run([sys.executable, str(program)], input=text, capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [answer["error"] for answer in answers if answer["result"] != 0]
    if failed or len(answers) < len(commands):
        raise RuntimeError(failed[0] if failed else done.stderr.strip().rpartition("\n")[2])
    return answers


def _smi(field: str) -> str:
    """One field of the first GPU, as nvidia-smi prints it."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({type(error).__name__})"


async def measured(mechanism: str, options: argparse.Namespace, rates: Mapping[str, float], deadline: float) -> MechanismResult:
    """Raises no Exception: what prevents the measurement is the result's obstacle. `deadline`: a time of time.monotonic."""
    result = MechanismResult(mechanism=mechanism)
    if mechanism == "hami-core" and options.hami_core is None:
        result.obstacle = "no library was given: --hami-core FILE"
        return result
    arguments = ["--sim", options.sim] if options.sim else []
    seconds = options.seconds or SLOW_SECONDS.get(mechanism, _SECONDS)
    time_is_over = f"the {options.minutes} minutes of the whole run were over (--minutes)"
    obstacles = []
    try:
        with tempfile.TemporaryDirectory(prefix="gpumgr-hw-", dir="/tmp") as folder:
            async with open_hardware_node(Path(folder), _settings(mechanism, options), arguments=arguments) as node:
                try:
                    async with asyncio.timeout_at(deadline):
                        await node.start({})
                        await measure(node, result, rates=rates, seconds=seconds)
                except TimeoutError as error:
                    obstacles.append(time_is_over if time.monotonic() >= deadline else str(error))
                except Exception as error:
                    obstacles.append(str(error) or repr(error))
                await node.until_mps_ended()
    except Exception as error:  # the other mechanisms are measured all the same
        obstacles.append(str(error) or repr(error))
    result.obstacle = "; ".join(obstacles) or None
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
