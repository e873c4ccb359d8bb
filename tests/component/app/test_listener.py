"""What the history says of GPUs whose health changes: lost, unhealthy, back, once each."""

from collections.abc import Mapping
from pathlib import Path

from gpumgr.agent.inventory import Inventory
from gpumgr.allocator.history import Entry
from gpumgr.app.listener import News
from gpumgr.nvml.health import GpuHealth, Reason, State
from gpumgr.proc import HostProcesses
from gpumgr.topology.devices import NodeSample, NodeSnapshot
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import World
from tests.unit.metrics.pictures import with_hole

NODE = snapshot(2, 16)
ZERO, ONE = (gpu.uuid for gpu in NODE.gpus)
Told = tuple[str | None, tuple[str, ...], str]


class Listening:
    def __init__(self, device_root: Path | None = None) -> None:
        self.world = World(NODE)
        self._device_root = device_root
        self.news = self._listen()

    def _listen(self) -> News:
        return News(
            self.world.books,
            HostProcesses(),
            device_root=str(self._device_root) if self._device_root else None,
            before_snapshot=self._ignore,
            on_processes=self._ignore,
            on_sample=lambda _sample: None,
        )

    async def restart(self, health: Mapping[str, GpuHealth], node: NodeSnapshot = NODE) -> None:
        """The agent starts again: what it was told before is in the history, and the driver is asked anew."""
        self.world.books.inventory = Inventory()
        self.news = self._listen()
        await self.news.health_changed(health)
        await self.news.snapshot_taken(node)

    async def _ignore(self, _what: NodeSnapshot | NodeSample, _started: Mapping[int, int] | None = None) -> None:
        pass

    async def turn(
        self, state: State, reason: Reason | None = None, message: str = "", *, uuid: str = ONE, held: str | None = None
    ) -> None:
        await self.news.health_changed({uuid: GpuHealth(state=state, reason=reason, message=message, since=0.0, held=held)})

    @property
    def told(self) -> list[Told]:
        entries = self.world.books.history.entries()
        return [(entry.code, entry.gpus, entry.why) for entry in entries if entry.what == "gpu"]


async def started(device_root: Path | None = None) -> Listening:
    listening = Listening(device_root)
    await listening.news.snapshot_taken(NODE)
    return listening


async def test_a_gpu_that_fails_and_comes_back_is_two_entries() -> None:
    node = await started()
    await node.turn("suspect", "error", "a doubt")
    await node.turn("unhealthy", "xid", "XID 79")
    await node.turn("unhealthy", "xid", "XID 79 again")
    await node.turn("probation", "xid", "XID 79 again")
    await node.turn("healthy")
    await node.turn("healthy")
    assert node.told == [
        ("unhealthy", ("00000001",), "XID 79"),
        ("back", ("00000001",), "it is well again and takes pods"),
    ]


async def test_what_gets_worse_is_told_again() -> None:
    node = await started()
    await node.turn("unhealthy", "ecc", "memory errors")
    await node.turn("unhealthy", "lost", "the GPU is lost")
    assert [code for code, _, _ in node.told] == ["unhealthy", "lost"]


async def test_what_an_operator_does_is_his_to_tell_and_hides_nothing() -> None:
    node = await started()
    await node.turn("healthy", held="swap the fan")
    await node.turn("probation", "operator", "released by the operator")
    await node.turn("healthy")
    assert node.told == []
    await node.turn("unhealthy", "xid", "XID 79")
    await node.turn("unhealthy", "xid", "XID 79", held="swap the card")
    inventory, card = node.world.books.inventory, node.world.books.ledger.cards.by_uuid[ONE]
    assert inventory.failures(node.world.books.ledger.cards) == {card.name: "XID 79"}
    await node.turn("healthy", held="swap the card")
    assert node.world.books.inventory.closures(node.world.books.ledger.cards) == {card.name: "swap the card"}
    assert [code for code, _, _ in node.told] == ["unhealthy"]
    await node.turn("probation", "operator", "released by the operator")
    await node.turn("healthy")
    assert [code for code, _, _ in node.told] == ["unhealthy", "back"]


async def test_mig_is_a_setting_and_no_illness() -> None:
    node = await started()
    await node.turn("unhealthy", "mig", "MIG is enabled")
    await node.turn("healthy")
    assert node.told == []


async def test_a_gpu_that_is_ill_from_the_start_is_told_once_it_has_a_name() -> None:
    node = Listening()
    await node.turn("unhealthy", "xid", "XID 79", uuid=ZERO)
    assert node.told == []
    await node.news.snapshot_taken(NODE)
    assert node.told == [("unhealthy", ("00000000",), "XID 79")]


async def test_a_missing_device_node_is_told_too(tmp_path: Path) -> None:
    for gpu in NODE.gpus:
        (tmp_path / f"nvidia{gpu.minor}").touch()
    node = await started(tmp_path)
    (tmp_path / "nvidia1").unlink()
    await node.news.sample_taken(NodeSample())
    ((code, gpus, why),) = node.told
    assert (code, gpus) == ("unhealthy", ("00000001",))
    assert "nvidia1 is missing" in why
    (tmp_path / "nvidia1").touch()
    await node.news.sample_taken(NodeSample())
    assert [code for code, _, _ in node.told] == ["unhealthy", "back"]


async def test_a_gpu_that_nobody_knows_and_that_can_not_be_described_is_told_once() -> None:
    hole = with_hole(snapshot(2, 16), 1)
    node = Listening()
    await node.news.snapshot_taken(hole)
    await node.news.snapshot_taken(hole)
    await node.restart({}, hole)
    assert node.told == [("not_readable", (), "GPU1 can't be described: GPU is lost")]
    await node.news.snapshot_taken(NODE)
    await node.news.snapshot_taken(with_hole(NODE, 0, 1))
    assert [why for _, _, why in node.told[1:]] == [f"GPU{n} can't be described: GPU is lost" for n in (0, 1)]


LOST = GpuHealth(state="unhealthy", reason="lost", message="the GPU is lost", since=0.0)
WELL = GpuHealth(state="healthy", since=0.0)


async def test_a_gpu_that_is_still_lost_after_a_restart_is_not_lost_again_and_comes_back_later() -> None:
    node = await started()
    await node.turn("unhealthy", "lost", "the GPU is lost")
    node.world.books.history.add(Entry(at=1.0, what="gpu", code="cordoned", gpus=("00000001",)))
    await node.restart({ONE: LOST, ZERO: WELL})
    await node.restart({ZERO: WELL}, snapshot(1, 16))  # the driver lists it no more
    assert [code for code, _, _ in node.told] == ["lost", "cordoned"]
    await node.restart({ONE: WELL, ZERO: WELL})
    assert [(code, gpus) for code, gpus, _ in node.told[2:]] == [("back", ("00000001",))]
    await node.restart({ONE: WELL, ZERO: WELL})
    assert len(node.told) == 3
