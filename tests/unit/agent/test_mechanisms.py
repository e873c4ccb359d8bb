"""Shares carry the names of what limits them, from the grant to every start of their containers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import BLOCK_BYTES, Resource
from gpumgr.enforcement.backend import Unlimited
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.ledger.gpu_share import GpuShare, Strength
from gpumgr.placement.pods import ContainerSpec, PodView
from gpumgr.settings.schema import EnforcementSettings
from gpumgr.sim.kubelet_pods import SimContainer, SimKubeletError
from tests.component.stage.stage import Clock, app, init, snapshot
from tests.unit.agent.world import Refused, World

ORDERS = ["core_first", "memory_first"]


class Recorded(Unlimited):
    """A mechanism that limits both resources and records its calls."""

    name = "hami-core"
    limits: Mapping[Resource, Strength] = {"core": "soft", "memory": "soft"}

    def __init__(self) -> None:
        super().__init__(lambda _tenant, _message: None)
        self.started: list[GpuShare] = []
        self.prepared: list[tuple[Resource, GpuShare]] = []

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:
        self.prepared.append((kind, tenant))
        (gpu,) = tenant.gpus
        return ContainerResponse(envs={f"LIMIT_{kind}": str(gpu.cores if kind == "core" else gpu.memory_bytes)})

    async def put_limits(self, tenant: GpuShare) -> None:
        self.started.append(tenant)


def limits_with(backend: Recorded, overrides: Sequence[str] = ()) -> Enforcer:
    nothing = Unlimited(lambda _tenant, _message: None)
    return Enforcer(
        [backend, nothing],
        EnforcementSettings(
            backend="hami-core", overrides=tuple(overrides), cdi_dir=Path("/nonexistent"), orphan_grace_seconds=0
        ),
        clock=Clock(),
    )


async def limited(overrides: Sequence[str] = (), **options: object) -> tuple[World, Recorded]:
    backend = Recorded()
    limits = limits_with(backend, overrides)
    await limits.choose()
    return await World.made(snapshot(2, 16), limits=limits, **options), backend


@pytest.mark.parametrize("order", ORDERS)
async def test_a_share_is_answered_with_its_limits_and_started_with_both(order: str) -> None:
    world, backend = await limited(resource_order=order)
    await world.run(world.pod("share", app(30, 8)))
    (allocation,) = world.ledger.allocations.values()
    assert allocation.mechanisms == ("hami-core",)
    envs = {key: value for answer in world.answers for key, value in answer.envs.items() if key.startswith("LIMIT")}
    assert envs == {"LIMIT_core": "30", "LIMIT_memory": str(8 * BLOCK_BYTES)}
    assert [answer.annotations["gpumgr.io/enforcement"] for answer in world.answers] == ["hami-core", "hami-core"]
    (started,) = backend.started
    assert (started.allocation, started.pod, started.container) == (allocation.id, ("team", "share"), "main")
    assert [(gpu.uuid, gpu.cores, gpu.memory_bytes) for gpu in started.gpus] == [(world.node.gpus[0].uuid, 30, 8 * BLOCK_BYTES)]


@pytest.mark.parametrize("order", ORDERS)
async def test_whole_gpus_of_a_pod_that_is_not_known_have_no_limits(order: str) -> None:
    world, backend = await limited(resource_order=order, known=False)
    await world.run(world.pod("whole", app(100, 8)))
    (allocation,) = world.ledger.allocations.values()
    assert allocation.mechanisms == ()
    assert backend.started == []


async def test_the_operators_exemption_applies_from_the_grant_on() -> None:
    world, backend = await limited(overrides=["team=none"])
    pod = await world.run(world.pod("share", app(30, 8)))
    (allocation,) = world.ledger.allocations.values()
    assert allocation.mechanisms == ("none",)
    world.limits = limits_with(backend)
    await world.restart()
    await world.start(pod)
    assert world.ledger.allocations[allocation.id].mechanisms == ("none",)
    assert backend.started == []


async def test_an_app_that_took_over_its_init_containers_ids_is_started_with_its_own_size() -> None:
    world, backend = await limited()
    await world.run(world.pod("stages", init(40, 8), app(20, 4)))
    sizes = {tenant.container: (gpu.cores, gpu.memory_bytes // BLOCK_BYTES) for tenant in backend.started for gpu in tenant.gpus}
    assert sizes == {"prepare": (40, 8), "main": (20, 4)}


async def test_an_exemption_needs_a_certain_caller() -> None:
    """PodResources is away, and the pod that seems to call is one that the operator excepts; neither is it at its later containers."""
    world, _ = await limited(overrides=["batch=none"], known=False)
    names = ("main", "second")
    waiting = PodView(
        namespace="batch",
        name="job",
        uid="uid-job",
        containers=tuple(ContainerSpec(name=name, cores=30, memory_blocks=8) for name in names),
    )
    world.pods.views[waiting.key] = waiting
    world.away = True
    await world.admit(world.pod("evil", *(SimContainer(name=name, cores=30, memory_blocks=8) for name in names)))
    assert [(a.pod, a.container, a.mechanisms, a.exemption) for a in world.ledger.allocations.values()] == [
        (("batch", "job"), name, ("hami-core",), None) for name in names
    ]


@pytest.mark.parametrize(
    ("exemption", "starts"), [("team", True), ("team/default", True), ("batch", False), ("team/root", False)]
)
async def test_an_exemption_is_checked_at_the_start(exemption: str, starts: bool) -> None:
    world, _ = await limited()
    pod = await world.run(world.pod("share", app(30, 8)))
    (allocation,) = world.ledger.allocations.values()
    await world.agent_state.commit(
        world.agent_state.ledger.occupy(replace(allocation, mechanisms=("none",), exemption=exemption))
    )
    if starts:
        await world.start(pod)
    else:
        with pytest.raises(SimKubeletError, match=f"admitted for a pod of {exemption}, which the operator exempts"):
            await world.start(pod)


async def test_a_share_without_known_limits_does_not_start() -> None:
    world, _ = await limited()
    pod = await world.run(world.pod("share", app(30, 8)))
    (allocation,) = world.ledger.allocations.values()
    await world.agent_state.commit(world.agent_state.ledger.occupy(replace(allocation, mechanisms=())))
    with pytest.raises(SimKubeletError, match="the limits of this container are no longer known"):
        await world.start(pod)


async def test_a_refused_response_leaves_nothing_in_the_ledger() -> None:
    world, backend = await limited()
    backend.prepare = refuse  # type: ignore[assignment,method-assign]
    with pytest.raises(Refused, match="no daemon"):
        await world.admit(world.pod("share", app(30, 8)))
    assert not world.ledger.allocations
    assert not world.checkpoint.allocations


def refuse(*_: object) -> ContainerResponse:
    raise Refusal("internal", "no daemon")
