"""Messages against the Go types and the code of Kubernetes itself (tests/e2e/go), without a cluster: extender/v1, which kube-scheduler
uses, and the kubelet's side of DRA with its own plugin managers."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpumgr.common.aio import LatestValue
from gpumgr.common.errors import Refusal
from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.enforcement import cdi
from gpumgr.kubelet.dra_service import DraHealth, Faults
from tests.component.kubelet.dra.harness import DRIVER, GPU, HELD, POOL, Linked, linked, plugin_of
from tests.unit.cluster.scheduler.test_wire import ANSWERS, GOLDENS, given, golden

from .build import build_program


@pytest.fixture(scope="module")
def extender() -> Path:
    return build_program("extender")


def test_the_goldens_are_what_the_go_types_write(extender: Path, tmp_path: Path) -> None:
    subprocess.run([extender, "goldens", tmp_path], check=True)
    written = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert written == {each.name: each.read_text() for each in GOLDENS.iterdir()}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_read_by_the_go_types_without_an_unknown_field(extender: Path, name: str) -> None:
    kind = {"filter": "filter", "priorities": "prioritize", "binding": "bind"}[name.partition("_")[0]]
    text = msgspec.json.encode(ANSWERS[name])
    read = subprocess.run([extender, "check", kind], input=text, stdout=subprocess.PIPE, check=True).stdout
    assert given(json.loads(read)) == given(json.loads(golden(name)))
    if isinstance(ANSWERS[name], list):
        return
    unknown = subprocess.run([extender, "check", kind], input=b'{"Unknown": 1}', capture_output=True, check=False)
    assert b'unknown field "Unknown"' in unknown.stderr


REGISTERED = LinkState(registered=True, registrations=1)
CLAIM = "team-a/a/uid-a"
ANSWER = {
    "requestNames": ["main"],
    "poolName": POOL,
    "deviceName": f"gpu-{GPU}",
    "cdiDeviceIds": [cdi.device_name(HELD.id, GPU)],
}


class Kubelet:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, *words: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(words).encode() + b"\n")
        reply: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return reply

    async def claims(self, *words: str) -> dict[str, Any]:
        """The answers by uid."""
        answer: dict[str, Any] = (await self.ask(*words))["answer"]["claims"]
        return answer

    async def health(self) -> list[dict[str, Any]]:
        """The devices of the next message."""
        devices: list[dict[str, Any]] = (await self.ask("health"))["answer"]["devices"]
        return devices

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def kubelet_of(program: Path, one: Linked) -> AsyncIterator[Kubelet]:
    process = await asyncio.create_subprocess_exec(
        program, one.kubelet.registry, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    kubelet = Kubelet(process)
    try:
        yield kubelet
    finally:
        await kubelet.end()


async def test_calls_through_the_kubelets_own_code(folder: Path) -> None:
    faults = LatestValue[Faults]({"gpu-0": None})
    async with (
        linked(folder, services=lambda claims: [plugin_of(claims), DraHealth(POOL, faults)]) as one,
        kubelet_of(build_program("plugins"), one) as kubelet,
    ):
        await one.until(lambda state: state == REGISTERED)
        [device] = await kubelet.health()
        assert (device["device"], device["health"]) == ({"poolName": "node-1", "deviceName": "gpu-0"}, "HEALTHY")
        faults.set({"gpu-0": "Xid 79"})
        while device["health"] == "HEALTHY":  # the list is repeated from time to time
            [device] = await kubelet.health()
        assert (device["health"], device["message"]) == ("UNHEALTHY", "Xid 79")

        one.claims.failures["b"] = Refusal("no_fit", "GPU 0 has 20 free cores")
        for command, share in ((("prepare", DRIVER), {"shareId": "s-1"}), (("beta-prepare", str(one.link._dra.path)), {})):
            assert await kubelet.claims(*command, CLAIM, "team-a/b/uid-b") == {
                "uid-a": {"devices": [ANSWER | share]},
                "uid-b": {"error": "GPU 0 has 20 free cores"},
            }
        for command in (("unprepare", DRIVER), ("beta-unprepare", str(one.link._dra.path))):
            assert await kubelet.claims(*command, CLAIM, "team-a/b/uid-b") == {
                "uid-a": {},
                "uid-b": {"error": "GPU 0 has 20 free cores"},
            }
        assert await kubelet.ask("prepare", DRIVER) == {"answer": {}}

        await one.link.stop(1)
        await kubelet.ask("unregistered", DRIVER)
