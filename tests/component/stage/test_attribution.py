"""Which container holds what the kubelet allocates, in every order of calls and without the API server."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpumgr.common.units import MEMORY_RESOURCE
from gpumgr.enforcement.backend import BackendName, Unlimited
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.kubelet.plugin import encode_devices
from gpumgr.ledger.answer import LIBRARY_PATH, HostPaths
from gpumgr.settings.schema import EnforcementSettings
from gpumgr.sim.kubelet import SimContainer
from tests.allocations import block_count
from tests.component.stage.stage import Clock, Stage, app, init, snapshot, stage


async def settle(node: Stage) -> None:
    """Sweeps until all that is free counts as free."""
    node.clock.now += 60
    for _ in range(3):
        assert await node.agent.reconciler.sweep()
        node.clock.now += 5


@pytest.mark.peer_bug("B3: it kills a pod if the kubelet's choice differs from its own")
async def test_the_kubelets_own_choice_is_kept(folder: Path) -> None:
    """Allocate takes valid ids that no preference named."""
    async with stage(folder) as node:
        await node.agent.allocate("core", [f"00000003-c{n:02}" for n in range(30)])
        await node.agent.allocate("memory", [f"00000003-m{n}" for n in range(4)])
        (allocation,) = node.ledger.allocations.values()
        assert (tuple(allocation.gpus), allocation.cores, block_count(allocation)) == (("00000003",), 30, 4)


@pytest.mark.peer_bug("B13: it refuses all pods until one that got cores and no memory has gone")
@pytest.mark.parametrize("known", [True, False])
async def test_a_pod_with_cores_and_no_memory_blocks_no_other_pod(folder: Path, known: bool) -> None:
    """The next pod is admitted at once; the ids of the half become free without help."""
    async with stage(folder, node=snapshot(1), known=known, resource_order="core_first") as node:
        half = node.pod("half", app(50, 8), known=known)
        offered = node.devices["memory"].value
        node.devices["memory"].set(encode_devices((f"00000000-m{n}", False, None) for n in range(16)))
        await node.kubelet.until(lambda: node.kubelet.node_status()[MEMORY_RESOURCE].allocatable == 0)
        status = await node.kubelet.run(half)
        assert "no healthy devices present" in (status.message or "")
        assert [(a.cores, block_count(a)) for a in node.ledger.allocations.values()] == [(50, 0)]
        if known:
            node.tell(half, phase="Failed")
        node.devices["memory"].set(offered)
        await node.kubelet.until_allocatable(MEMORY_RESOURCE)
        following = node.pod("following", app(50, 8), known=known)
        status = await node.kubelet.run(following)
        assert status.phase == "Running", status.message
        await settle(node)
        node.check_agreement(following)
        assert len(node.ledger.allocations) == 1
        last = node.pod("last", app(50, 8), known=known)
        assert (await node.kubelet.run(last)).phase == "Running"
        node.check_agreement(following, last)


@pytest.mark.peer_bug("B14: it serves app containers alone")
@pytest.mark.parametrize(
    "containers",
    [
        pytest.param([init(10, 2), app(30, 6)], id="init"),
        pytest.param([init(100, 16), app(100, 16)], id="whole GPU"),
        pytest.param([SimContainer(name="watch", cores=5, memory_blocks=1, kind="sidecar"), app(30, 6)], id="sidecar"),
        pytest.param(
            [init(10, 2), SimContainer(name="watch", cores=5, memory_blocks=1, kind="sidecar"), init(20, 4, "warm"), app(30, 6)],
            id="all of them",
        ),
    ],
)
async def test_init_containers_and_sidecars_have_their_own_allocations(folder: Path, containers: Sequence[SimContainer]) -> None:
    for seed in range(3):
        async with stage(folder / str(seed), seed=seed) as node:
            pod = node.pod("train", *containers)
            await node.run_all(pod)
            node.check_agreement(pod)
            assert {a.container for a in node.ledger.allocations.values()} == {c.name for c in containers}


class Vcuda(Unlimited):
    """In place of the backend that supplies the share's folder."""

    name: BackendName = "vcuda"


@pytest.mark.peer_bug("B55: it loses the mode of a container when it answers from its store")
async def test_a_share_never_gets_the_driver_folder_of_whole_gpus(folder: Path) -> None:
    """At the first answer and at every later start."""
    host = HostPaths(
        exists=lambda _path: True, share_driver_dir="/run/share", whole_driver_dir="/run/whole", allocation_dir=str(folder / "vm")
    )
    limits = Enforcer(
        [Vcuda(lambda _tenant, _message: None)],
        EnforcementSettings(backend="vcuda", cdi_dir=folder / "cdi", orphan_grace_seconds=0),
        clock=Clock(),
    )
    await limits.choose()
    async with stage(folder, host=host, enforcement=limits) as node:
        share, whole = node.pod("share", init(20, 4), app(20, 4)), node.pod("whole", app(100))
        expected = {"share": "/run/share", "whole": "/run/whole"}
        for pod in (share, whole):
            await node.run_all(pod)
        for pod in (share, whole, share, whole):
            for container in pod.containers:
                answer = await node.kubelet.start_container(pod, container.name)
                drivers = [mount.host_path for mount in answer.mounts if mount.container_path == LIBRARY_PATH]
                assert drivers == [expected[pod.name]]
                assert pod is whole or not any("/run/whole" in mount.host_path for mount in answer.mounts)
