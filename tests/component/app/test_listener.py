"""What the history says of GPUs whose health changes: lost, unhealthy, back, once each."""

from collections.abc import Mapping
from pathlib import Path

from gpumgr.app.listener import News
from gpumgr.nvml.health import GpuHealth, Reason, State
from gpumgr.proc import HostProcesses
from gpumgr.topology.devices import NodeSample, NodeSnapshot
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import World

NODE = snapshot(2, 16)
ZERO, ONE = (gpu.uuid for gpu in NODE.gpus)
Told = tuple[str | None, tuple[str, ...], str]


class Listening:
    def __init__(self, device_root: Path | None = None) -> None:
        self.world = World(NODE)
        self.news = News(
            self.world.books,
            HostProcesses(),
            device_root=str(device_root) if device_root else None,
            before_snapshot=self._ignore,
            on_processes=self._ignore,
            on_sample=lambda _sample: None,
        )

    async def _ignore(self, _what: NodeSnapshot | NodeSample, _started: Mapping[int, int] | None = None) -> None:
        pass

    async def turn(self, state: State, reason: Reason | None = None, message: str = "", *, uuid: str = ONE) -> None:
        await self.news.health_changed({uuid: GpuHealth(state=state, reason=reason, message=message, since=0.0)})

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
    await node.turn("unhealthy", "operator", "swap the fan")
    await node.turn("probation", "operator", "released by the operator")
    await node.turn("healthy")
    assert node.told == []
    await node.turn("unhealthy", "xid", "XID 79")
    await node.turn("unhealthy", "operator", "swap the card")
    await node.turn("probation", "operator", "released by the operator")
    await node.turn("healthy")
    assert [code for code, _, _ in node.told] == ["unhealthy", "back"]


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
