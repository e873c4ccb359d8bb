"""The whole agent with MPS: NVIDIA's control program is a stand-in, and the simulated driver lists its server and clients."""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod
from tests import mps_control

from .stage import app, run, stage, until_sampled


@contextlib.asynccontextmanager
async def mps_node(folder: Path, *, idle_seconds: float, sample_period_seconds: float) -> AsyncIterator[SimulatedNode]:
    """Its agent runs. At the end its daemons have ended."""
    program, behaviour = folder / "nvidia-cuda-mps-control", folder / "behaviour.json"
    behaviour.write_text(json.dumps({"sim_dir": str(folder / "gpus")}))
    program.write_text(f'#!/bin/sh\nFAKE_MPS_BEHAVIOUR={shlex.quote(str(behaviour))} exec {mps_control.build()} "$@"\n')
    program.chmod(0o755)
    settings = {
        "enforcement": {"backend": "mps"},
        "mps": {"control_program": str(program), "protocol": "2", "idle_seconds": idle_seconds},
        "nvml": {"sample_period_seconds": sample_period_seconds},
    }
    async with stage(folder, settings=settings) as node:
        await node.start_agent()
        try:
            yield node
        finally:
            for pod in list(node.pods.values()):
                node.delete(pod)
            while any((folder / "checkpoint/mps").glob("*")):  # noqa: ASYNC110 (it is another process)
                await asyncio.sleep(0.05)


def _all_but_stat_and_cgroup(_: str, names: list[str]) -> set[str]:
    return {*names} - {"stat", "cgroup"}


async def client(node: SimulatedNode, pod: SimPod) -> asyncio.subprocess.Process:
    """A CUDA program, which makes the daemon start its server. The simulated node gets the server's process: its others are files."""
    (gpu,) = node.gpus_of(pod)
    uuid = node.description.uuid_of(node.indices[gpu])
    program = await asyncio.create_subprocess_exec(
        node.folder / "nvidia-cuda-mps-control",
        "attach",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "CUDA_MPS_PIPE_DIRECTORY": str(node.folder / "run/mps" / uuid / "pipe")},
    )
    assert program.stdout is not None
    server = json.loads(await program.stdout.readline())["server"]
    shutil.copytree(f"/proc/{server}", node.runtime.processes.proc_root / str(server), ignore=_all_but_stat_and_cgroup)
    assert f"mpsserver {node.indices[gpu]} {server} " in (node.folder / "gpus/control.txt").read_text()
    return program


async def test_after_the_last_container_of_a_gpu_ends_the_gpu_takes_new_pods_at_once(folder: Path) -> None:
    """The server runs on: NVML lists it, and it is no process of the container that has ended."""
    async with mps_node(folder, idle_seconds=60.0, sample_period_seconds=0.2) as node:
        pod = await run(node, "a", app(30, 4))
        program = await client(node, pod)
        node.use(pod, memory_bytes=1 << 30)
        await until_sampled(node)
        (gpu,) = node.gpus_of(pod)
        await program.communicate(b"")
        node.delete(pod)
        await node.agent_log.until("allocation_freed")
        await until_sampled(node)
        assert f"mpsserver {node.indices[gpu]} " in (node.folder / "gpus/control.txt").read_text()
        assert [each["takes_nothing_new"] for each in await node.graph()] == [None] * 4
        metrics = await node.metrics()
        assert sum(value for (name, _), value in metrics.items() if name.startswith("gpumgr_unaccounted_")) == 0
        assert not [line for event in ("gpu_quarantined", "gpu_process_unattributed") for line in node.agent_log.find(event)]
        await run(node, "all", app(400))


async def test_an_idle_daemon_ends_although_no_sample_is_taken(folder: Path) -> None:
    async with mps_node(folder, idle_seconds=0.5, sample_period_seconds=3600) as node:
        pod = await run(node, "a", app(30, 4))
        pid = node.agent_log.find("mps_daemon_started")[-1]["pid"]  # the first one was a try
        node.delete(pod)
        await node.agent_log.until("mps_daemon_stopped", pid=pid)
        assert not node.agent_log.find("orphan_removed")
