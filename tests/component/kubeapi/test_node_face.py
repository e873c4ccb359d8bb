"""What the node showed of us is taken away again, and nothing else with it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpumgr.kubeapi.client import ApiServer
from gpumgr.kubeapi.writer.announcer import Announcer
from gpumgr.kubeapi.writer.condition import NO_CONDITION, Condition

from .conftest import write_kubeconfig

TROUBLE = Condition(trouble=True, reason="GpuUnhealthy", message="GPU3: XID 79")
LABELS = {"nvidia.com/gpu.count": "8", "gaia.tencent.com/gpu-model": "H100"}
#: Another's.
READY = {"type": "Ready", "status": "True"}


class OneNode:
    """The Node as the API server keeps it. Of strategic merge patches it knows conditions and `$patch: delete`."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {"zone": "a"}
        self.annotations: dict[str, str] = {"theirs": "1"}
        self.conditions: dict[str, dict[str, Any]] = {"Ready": READY}
        self.forbidden: set[str] = set()
        self.requests: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        what = f"{request.method} {request.path.rpartition('/')[2]}"
        self.requests.append(what)
        if what in self.forbidden:
            return web.json_response({"kind": "Status", "message": "forbidden"}, status=403)
        if request.method == "PATCH":
            patch = json.loads(await request.read())
            strategic = request.content_type == "application/strategic-merge-patch+json"
            assert strategic == request.path.endswith("/status")
            self._patch_status(patch["status"]) if strategic else self._patch(patch["metadata"])
        metadata = {"name": "node-1", "labels": self.labels, "annotations": self.annotations}
        return web.json_response({"metadata": metadata, "status": {"conditions": list(self.conditions.values())}})

    def _patch(self, metadata: dict[str, dict[str, str | None]]) -> None:
        for there, changes in ((self.labels, metadata.get("labels", {})), (self.annotations, metadata.get("annotations", {}))):
            for key, value in changes.items():
                there.pop(key, None)
                if value is not None:
                    there[key] = value

    def _patch_status(self, status: dict[str, list[dict[str, Any]]]) -> None:
        for condition in status["conditions"]:
            if condition.get("$patch") == "delete":
                self.conditions.pop(condition["type"], None)
            else:
                self.conditions[condition["type"]] = self.conditions.get(condition["type"], {}) | condition


@pytest.fixture
async def node() -> OneNode:
    return OneNode()


@asynccontextmanager
async def announcing(node: OneNode, folder: Path) -> AsyncIterator[Announcer]:
    """A life of the agent's writer."""
    app = web.Application()
    app.router.add_route("*", "/api/v1/nodes/{path:.*}", node.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server = await ApiServer.connect(write_kubeconfig(folder / "kubeconfig", f"http://127.0.0.1:{runner.addresses[0][1]}"))
    announcer = Announcer(server, "node-1")
    task = asyncio.create_task(announcer.run())
    try:
        yield announcer
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait([task])
        await server.close()
        await runner.cleanup()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110 (it is behind a connection)
            await asyncio.sleep(0.002)


async def describe(node: OneNode, announcer: Announcer) -> None:
    announcer.label_node(LABELS)
    announcer.tell_condition(TROUBLE)
    await until(lambda: "GpuTrouble" in node.conditions and not announcer.state().waiting)
    assert node.labels == {"zone": "a", **LABELS}


@pytest.mark.parametrize("later", [False, True], ids=["the same life", "a later life"])
async def test_labels_annotation_and_condition_are_taken_away_and_the_log_says_so(
    later: bool, node: OneNode, tmp_path: Path
) -> None:
    async with announcing(node, tmp_path) as first:
        await describe(node, first)
        with capture_logs() as logs:
            if later:
                async with announcing(node, tmp_path) as second:
                    await take_away(second)
            else:
                await take_away(first)
    assert (node.labels, node.annotations, node.conditions) == ({"zone": "a"}, {"theirs": "1"}, {"Ready": READY})
    assert [(line["event"], line["what"]) for line in logs] == [
        ("node_description_removed", "labels"),
        ("node_description_removed", "condition"),
    ]


async def take_away(announcer: Announcer) -> None:
    announcer.tell_condition(NO_CONDITION)
    announcer.label_node({})
    await until(lambda: not announcer.state().waiting)


async def test_where_nothing_is_nothing_is_written(node: OneNode, tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with announcing(node, tmp_path) as announcer:
            await take_away(announcer)
            await take_away(announcer)
    assert node.requests == ["GET node-1"] * 2
    assert logs == []


async def test_what_was_taken_away_can_be_told_again(node: OneNode, tmp_path: Path) -> None:
    async with announcing(node, tmp_path) as announcer:
        await describe(node, announcer)
        await take_away(announcer)
        await describe(node, announcer)
    assert node.conditions["GpuTrouble"]["status"] == "True"
    assert node.annotations["gpumgr.io/labels"] == ",".join(sorted(LABELS))


@pytest.mark.parametrize("forbidden", [{"GET node-1"}, {"PATCH node-1", "PATCH status"}])
async def test_without_rights_it_stays_and_nobody_is_warned_of_rights(forbidden: set[str], node: OneNode, tmp_path: Path) -> None:
    async with announcing(node, tmp_path) as announcer:
        await describe(node, announcer)
        node.forbidden |= forbidden
        with capture_logs() as logs:
            await take_away(announcer)
    assert "GpuTrouble" in node.conditions
    assert [(line["event"], line["what"], line["log_level"]) for line in logs] == [
        ("node_description_left", "labels", "info"),
        ("node_description_left", "condition", "info"),
    ]
    assert ("node", "refused") not in announcer.state().written
