"""Which device lists are published and when; which the kubelet must have received by now."""

import asyncio

import pytest

from gpumgr.agent.state import SETTLE_SECONDS, DeviceListPublisher
from gpumgr.common.units import BLOCK_MEBIBYTES
from gpumgr.ledger.ids import ALL_CORES, RegisteredGpu
from gpumgr.ledger.node import GpuDevices, NodeDevices
from tests.component.stage.stage import Clock

GPU = RegisteredGpu("0000abcd", "GPU-0000abcd", 4 * BLOCK_MEBIBYTES)
ALL = 0b1111


def node_devices(cores: int = ALL_CORES, blocks: int = ALL, gpu: RegisteredGpu = GPU) -> NodeDevices:
    return (GpuDevices(gpu, cores, blocks),)


class Kubelet:
    """Records published device lists; the test advances the clock."""

    def __init__(self, *, watching: bool = True) -> None:
        self.heard: list[NodeDevices] = []
        self.told = asyncio.Event()
        self.clock = Clock()
        self.device_lists = DeviceListPublisher(self._publish, clock=self.clock)
        if watching:
            self.device_lists.start()

    def _publish(self, new: NodeDevices) -> None:
        self.heard.append(new)
        self.told.set()

    @property
    def seen(self) -> int:
        return self.device_lists.visible_blocks()[GPU.name]


async def test_nothing_is_published_before_the_start() -> None:
    kubelet = Kubelet(watching=False)
    kubelet.device_lists.update(node_devices(blocks=0b0001))
    kubelet.device_lists.update(node_devices())
    assert kubelet.heard == []
    kubelet.device_lists.start()
    assert kubelet.heard == [node_devices()]
    assert kubelet.seen == ALL, "the first list counts as seen at once"


async def test_changes_of_blocks_are_collected() -> None:
    kubelet = Kubelet()
    kubelet.device_lists.update(node_devices())
    kubelet.clock.now += SETTLE_SECONDS - 0.01
    for blocks in (0b0001, 0b0011, 0b0111):
        kubelet.device_lists.update(node_devices(blocks=blocks))
    assert len(kubelet.heard) == 1
    kubelet.told.clear()
    await kubelet.told.wait()
    assert kubelet.heard[1:] == [node_devices(blocks=0b0111)]


async def test_a_change_that_is_reverted_is_never_published() -> None:
    kubelet = Kubelet()
    kubelet.device_lists.update(node_devices())
    kubelet.device_lists.update(node_devices(blocks=0))
    kubelet.device_lists.update(node_devices())
    kubelet.clock.now += 5
    kubelet.device_lists.update(node_devices(blocks=0b0001))
    assert kubelet.heard == [node_devices(), node_devices(blocks=0b0001)]


@pytest.mark.parametrize(
    "urgent",
    [
        node_devices(cores=0, blocks=0),
        node_devices(blocks=ALL, gpu=RegisteredGpu(GPU.name, GPU.uuid, 8 * BLOCK_MEBIBYTES)),
        (*node_devices(), GpuDevices(RegisteredGpu("0000beef", "GPU-0000beef", 4 * BLOCK_MEBIBYTES), ALL_CORES, ALL)),
    ],
    ids=["fails", "grows", "comes"],
)
async def test_a_gpu_that_fails_grows_or_is_added_is_published_at_once(urgent: NodeDevices) -> None:
    """What was held back goes with it."""
    kubelet = Kubelet()
    kubelet.device_lists.update(node_devices())
    kubelet.device_lists.update(node_devices(blocks=0b0111))
    kubelet.device_lists.update(urgent)
    assert kubelet.heard == [node_devices(), urgent]
    kubelet.device_lists.close()


async def test_a_block_counts_as_seen_healthy_a_second_after_its_publication() -> None:
    kubelet = Kubelet()
    kubelet.device_lists.update(node_devices(blocks=0b0001))
    kubelet.clock.now += 2
    kubelet.device_lists.update(node_devices(blocks=ALL))
    assert kubelet.seen == 0b0001
    kubelet.clock.now += SETTLE_SECONDS
    assert kubelet.seen == ALL


async def test_blocks_that_change_often_are_not_visible_until_they_are_stable() -> None:
    kubelet = Kubelet()
    kubelet.device_lists.update(node_devices())
    for blocks in (0b0001, ALL, 0b0011, ALL):
        kubelet.clock.now += SETTLE_SECONDS / 2
        kubelet.device_lists.update(node_devices(cores=ALL_CORES - len(kubelet.heard), blocks=blocks))
    assert kubelet.seen == 0b0001
    kubelet.clock.now += SETTLE_SECONDS
    assert kubelet.seen == ALL


async def test_an_urgent_publication_includes_delayed_changes_and_counts() -> None:
    kubelet = Kubelet()
    kubelet.device_lists.update(node_devices(blocks=0b0001))
    kubelet.device_lists.update(node_devices())
    assert kubelet.heard == [node_devices(blocks=0b0001)]
    assert kubelet.device_lists.hurry()
    assert kubelet.heard[-1] == node_devices()
    assert kubelet.seen == 0b0001
    assert kubelet.device_lists.visible_blocks(0)[GPU.name] == ALL


async def test_after_the_close_nothing_is_published() -> None:
    kubelet = Kubelet()
    kubelet.device_lists.update(node_devices())
    kubelet.clock.now += SETTLE_SECONDS - 0.001
    kubelet.device_lists.update(node_devices(blocks=0))
    kubelet.device_lists.close()
    await asyncio.sleep(0.01)
    assert len(kubelet.heard) == 1
