"""The history of GPU health: lost, unhealthy, recovered, one entry for each change."""

from collections.abc import Mapping
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from gpumgr.agent.inventory import Inventory
from gpumgr.common.proc import HostProcesses
from gpumgr.driver.hardware_events import HardwareEvents
from gpumgr.driver.health import GpuHealth, Reason, State
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.node import NodeDevices
from gpumgr.placement.devices import NodeSample, NodeSnapshot
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import World
from tests.unit.web.metrics.pictures import with_hole

NODE = snapshot(2, 16)
ZERO, ONE = (gpu.uuid for gpu in NODE.gpus)
Told = tuple[str | None, tuple[str, ...], str]


class EventNode:
    """`device_root`: the folder of device nodes; None: the GPUs are simulated ones, which need none."""

    def __init__(self, device_root: Path | None = None) -> None:
        self.world, self._device_root = World(NODE), device_root
        self.hardware_events = self._listen()

    def _listen(self) -> HardwareEvents:
        return HardwareEvents(
            self.world.agent_state,
            HostProcesses(),
            device_root=str(self._device_root or "/dev"),
            simulated=self._device_root is None,
            before_snapshot=AsyncMock(),
            on_sample=AsyncMock(),
        )

    async def restart(self, health: Mapping[str, GpuHealth], node: NodeSnapshot = NODE) -> None:
        """The agent restarts: earlier reports are in the history, and the driver is read anew."""
        self.world.agent_state.inventory = Inventory()
        self.hardware_events = self._listen()
        await self.hardware_events.health_changed(health)
        await self.hardware_events.snapshot_taken(node)

    async def turn(
        self, state: State, reason: Reason | None = None, message: str = "", *, uuid: str = ONE, cordon_reason: str | None = None
    ) -> None:
        await self.hardware_events.health_changed(
            {uuid: GpuHealth(state=state, reason=reason, message=message, since=0.0, cordon_reason=cordon_reason)}
        )

    @property
    def told(self) -> list[Told]:
        entries = self.world.agent_state.history.entries()
        return [(entry.code, entry.gpus, entry.why) for entry in entries if entry.what == "gpu"]

    @property
    def failures(self) -> Mapping[str, str]:
        state = self.world.agent_state
        return state.inventory.failures(state.ledger.gpu_registry)


async def started(device_root: Path | None = None) -> EventNode:
    listening = EventNode(device_root)
    await listening.hardware_events.snapshot_taken(NODE)
    return listening


async def test_a_snapshot_is_one_list_with_the_health_of_its_gpus(tmp_path: Path) -> None:
    """A GPU without its device node is not offered, not even until the health is published."""
    (tmp_path / "nvidia0").touch()
    node = EventNode(tmp_path)
    node.world.device_lists.start()
    healthy: list[list[int]] = []
    updated = node.world.device_lists.update

    def update(devices: NodeDevices) -> None:
        healthy.append([each.healthy_cores.bit_count() for each in devices])
        updated(devices)

    node.world.device_lists.update = update  # type: ignore[method-assign, assignment]
    await node.hardware_events.snapshot_taken(NODE)
    assert healthy == [[100, 0]]


async def test_a_gpu_without_its_device_node_is_closed_with_the_reason_until_the_node_is_back(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    node = await started(tmp_path)
    why = f"its device node {tmp_path}/nvidia1 is missing: run `nvidia-modprobe -c 1` or restart nvidia-persistenced"
    assert (node.failures, node.told) == ({"00000001": why}, [("unhealthy", ("00000001",), why)])
    (tmp_path / "nvidia1").touch()
    await node.hardware_events.sample_taken(NodeSample())
    assert (node.failures, node.told[1:]) == ({}, [BACK])


BACK = ("back", ("00000001",), "it is healthy again and takes pods")


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        (
            [
                ("suspect", "error", "a doubt"),
                ("unhealthy", "xid", "XID 79"),
                ("unhealthy", "xid", "XID 79 again"),
                ("probation", "xid", "XID 79 again"),
                ("healthy", None, ""),
                ("healthy", None, ""),
            ],
            [("unhealthy", ("00000001",), "XID 79"), BACK],
        ),
        (
            [("unhealthy", "ecc", "memory errors"), ("unhealthy", "lost", "the GPU is lost")],
            [("unhealthy", ("00000001",), "memory errors"), ("lost", ("00000001",), "the GPU is lost")],
        ),
        ([("unhealthy", "mig", "MIG is enabled"), ("healthy", None, "")], []),  # a setting
    ],
)
async def test_changes_of_health_are_entries(turns: list[tuple[State, Reason | None, str]], told: list[Told]) -> None:
    node = await started()
    for turn in turns:
        await node.turn(*turn)
    assert node.told == told


async def test_a_cordon_is_no_health_event_and_hides_none() -> None:
    node = await started()
    await node.turn("healthy", cordon_reason="swap the fan")
    await node.turn("probation", "operator", "uncordoned by the operator")
    await node.turn("healthy")
    assert node.told == []
    await node.turn("unhealthy", "xid", "XID 79")
    await node.turn("unhealthy", "xid", "XID 79", cordon_reason="swap the GPU")
    assert node.failures == {"00000001": "XID 79"}
    await node.turn("healthy", cordon_reason="swap the GPU")
    state = node.world.agent_state
    assert state.inventory.unschedulable_reasons(state.ledger.gpu_registry) == {"00000001": "swap the GPU"}
    assert [code for code, _, _ in node.told] == ["unhealthy"]
    await node.turn("probation", "operator", "uncordoned by the operator")
    await node.turn("healthy")
    assert [code for code, _, _ in node.told] == ["unhealthy", "back"]


async def test_a_gpu_that_is_unhealthy_from_the_start_is_reported_when_its_uuid_is_known() -> None:
    node = EventNode()
    await node.turn("unhealthy", "xid", "XID 79", uuid=ZERO)
    assert node.told == []
    await node.hardware_events.snapshot_taken(NODE)
    assert node.told == [("unhealthy", ("00000000",), "XID 79")]


async def test_an_unknown_gpu_that_can_not_be_described_is_reported_once() -> None:
    hole = with_hole(snapshot(2, 16), 1)
    node = EventNode()
    await node.hardware_events.snapshot_taken(hole)
    await node.hardware_events.snapshot_taken(hole)
    await node.restart({}, hole)
    assert node.told == [("not_readable", (), "GPU1 can't be described: GPU is lost")]
    await node.hardware_events.snapshot_taken(NODE)
    await node.hardware_events.snapshot_taken(with_hole(NODE, 0, 1))
    assert [why for _, _, why in node.told[1:]] == [f"GPU{n} can't be described: GPU is lost" for n in (0, 1)]


LOST = GpuHealth(state="unhealthy", reason="lost", message="the GPU is lost", since=0.0)
WELL = GpuHealth(state="healthy", since=0.0)


async def test_a_gpu_that_is_still_lost_after_a_restart_is_not_lost_again_and_comes_back_later() -> None:
    node = await started()
    await node.turn("unhealthy", "lost", "the GPU is lost")
    node.world.agent_state.history.add(HistoryEntry(at=1.0, what="gpu", code="cordoned", gpus=("00000001",)))
    await node.restart({ONE: LOST, ZERO: WELL})
    await node.restart({ZERO: WELL}, snapshot(1, 16))  # the driver no longer lists it
    assert [code for code, _, _ in node.told] == ["lost", "cordoned"]
    await node.restart({ONE: WELL, ZERO: WELL})
    assert [(code, gpus) for code, gpus, _ in node.told[2:]] == [("back", ("00000001",))]
    await node.restart({ONE: WELL, ZERO: WELL})
    assert len(node.told) == 3
