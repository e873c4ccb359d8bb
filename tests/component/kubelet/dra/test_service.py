"""The DRA service as the kubelet calls it, through grpcio."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from gpumgr.agent.claims import NodeClaims
from gpumgr.common.errors import Refusal
from gpumgr.common.rpc.unix_server import UnixServer
from gpumgr.enforcement import cdi
from gpumgr.kubelet.dra_service import DraPlugin
from gpumgr.ledger.ledger import Allocation, ClaimRef
from tests.background import until
from tests.component.kubelet.calls import channel_to, refusal
from tests.component.kubelet.dra.harness import GPU, HELD, POOL, Caller, ScriptedClaims, claim, plugin_of


class Served:
    def __init__(self, folder: Path) -> None:
        self.claims, self.outcomes = ScriptedClaims(), list[tuple[str, str]]()
        plugin = plugin_of(self.claims)
        plugin.observe = lambda rpc, outcome, _seconds: self.outcomes.append((rpc, outcome))
        self.server = UnixServer(folder / "dra.sock", [plugin])


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    served = Served(folder)
    await served.server.listen()
    yield served
    await served.server.drain(0)


@pytest.fixture
async def channel(served: Served) -> AsyncIterator[Any]:
    async with channel_to(served.server.path) as channel:
        yield channel


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_prepare_and_unprepare(channel: Any, served: Served, version: str) -> None:
    caller = Caller(channel, version)
    answer = await caller.prepare(claim("a"), claim("b"))
    assert sorted(answer.claims) == ["uid-a", "uid-b"]
    for each in answer.claims.values():
        [device] = each.devices
        assert not each.error
        assert list(device.request_names) == ["main"]
        assert (device.pool_name, device.device_name) == (POOL, f"gpu-{GPU}")
        assert list(device.cdi_device_ids) == [cdi.device_name(HELD.id, GPU)]
        assert device.share_id == "s-1"
    answer = await caller.unprepare(claim("a"))
    assert [(uid, each.error) for uid, each in answer.claims.items()] == [("uid-a", "")]
    assert served.claims.calls == [("prepare", claim("a")), ("prepare", claim("b")), ("unprepare", claim("a"))]
    assert served.outcomes == [("NodePrepareResources", "ok"), ("NodeUnprepareResources", "ok")]


@pytest.mark.parametrize("verb", ["prepare", "unprepare"])
async def test_failures_are_those_of_their_claim(channel: Any, served: Served, verb: str) -> None:
    served.claims.failures = {
        "bug": OSError(28, "no space on \udcff"),
        "refused": Refusal("no_fit", "GPU 0 has 20 free cores – «100 %»\n"),
        "empty": Refusal("conflict", ""),
    }
    with capture_logs() as logs:
        answer = await getattr(Caller(channel), verb)(*map(claim, ("fine", "bug", "refused", "empty")))
    errors = {uid: each.error for uid, each in answer.claims.items()}
    rpc = f"Node{verb.title()}Resources"
    assert errors == {
        "uid-fine": "",
        "uid-bug": f"gpumgr failed inside {rpc} (OSError: [Errno 28] no space on ?); its log has the details",
        "uid-refused": "GPU 0 has 20 free cores – «100 %»\n",
        "uid-empty": "no reason given",
    }
    [line] = logs
    assert (line["event"], line["claim"], line["uid"], line["exc_info"]) == ("claim_failed", "team-a/bug", "uid-bug", True)
    assert served.outcomes == [(rpc, "internal")]


async def test_claims_are_decided_at_the_same_time_and_to_the_end(channel: Any, served: Served) -> None:
    served.claims.hold = asyncio.Event()
    call = Caller(channel).prepare(claim("a"), claim("b"))
    await served.claims.until_began(2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: bool(served.outcomes))
    assert served.outcomes == [("NodePrepareResources", "cancelled")]
    assert served.claims.ended == 0
    served.claims.hold.set()
    await until(lambda: served.claims.ended == 2)


@pytest.mark.parametrize("garbage", [b"\x0a\x7fgarbage", b"\x0a\x03\x0a\x7fx", b"\x0a\x03\x0a\x01\xff"])
async def test_malformed_bytes_are_refused_and_the_server_continues(channel: Any, garbage: bytes) -> None:
    for verb in ("Prepare", "Unprepare"):
        rpc = f"Node{verb}Resources"
        status, text = await refusal(channel.unary_unary(f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{rpc}")(garbage))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert f"can't read this {rpc} request" in text
    assert dict((await Caller(channel).prepare()).claims) == {}


async def test_the_time_that_a_call_has_waited_is_taken_from_its_decision() -> None:
    """The kubelet ends a call after 45 s, and then no reason reaches the pod."""

    class Deciding(ScriptedClaims):
        async def prepare(self, claim: ClaimRef, *, deadline: float) -> Sequence[Allocation]:
            deadlines.append(deadline)
            return await super().prepare(claim, deadline=deadline)

    deadlines, plugin = list[float](), DraPlugin("node-1", wait_seconds=5.0)
    began = time.monotonic()
    call = asyncio.create_task(plugin._prepare(claim("a")))
    await asyncio.sleep(0.2)
    decided = time.monotonic()
    plugin.decide_with(cast("NodeClaims", Deciding()))
    await call
    assert began + 5.0 <= deadlines[0] < decided + 5.0


async def test_a_decision_whose_limits_take_too_long_is_a_refusal_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumgr.kubelet.dra_service.START_SECONDS", 0.1)
    claims, plugin = ScriptedClaims(hold=asyncio.Event()), DraPlugin("node-1", wait_seconds=0.1)
    plugin.decide_with(cast("NodeClaims", claims))
    with pytest.raises(Refusal, match=r"not prepared within 0.2 s"):
        await plugin._prepare(claim("a"))
    assert claims.hold is not None
    claims.hold.set()
    await until(lambda: claims.ended == 1)


async def test_a_call_that_waits_too_long_is_refused_with_the_reason() -> None:
    plugin = DraPlugin("node-1", wait_seconds=0.01)
    plugin.waits_for = "another gpumgr agent (pid 7) runs on this node"
    with pytest.raises(Refusal, match=r"no decision within 0.01 s: another gpumgr agent \(pid 7\) runs on this node"):
        await plugin._prepare(claim("a"))
