"""The unix socket: who may open it, what it replaces, and the orders that only it takes."""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from gpumgr.agent.maintenance import MaintenanceRequest
from gpumgr.common.errors import InputError, NvmlError, Refusal
from gpumgr.web.handlers import PATHS
from gpumgr.web.listening import ListenError
from tests.component.web.conftest import Serve
from tests.component.web.scene import REMOTE, TLS, Scene, by_unix, get, page_server, parsed, say


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "agent.sock"


@pytest.fixture
async def root(serve: Serve, path: Path, token_file: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """Needs neither TLS nor a token, which others need."""
    await serve(unix_socket=path, token_file=token_file, **TLS)
    async with by_unix(path) as session:
        yield session


async def test_it_serves_every_page_and_only_its_owner_may_connect(root: aiohttp.ClientSession, path: Path) -> None:
    for page in PATHS[:-1]:  # all but orders
        async with root.get(page.format(namespace="team", pod="share")) as answer:
            assert answer.status == 200
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


async def test_a_stale_socket_is_replaced_and_goes_with_the_server(scene: Scene, path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = page_server(scene, unix_socket=path)
    await server.start()
    async with by_unix(path) as root, root.get("/healthz") as answer:
        assert answer.status == 200
    await server.stop()
    assert os.listdir(path.parent) == []


async def test_a_living_socket_is_left_alone(scene: Scene, root: aiohttp.ClientSession, path: Path) -> None:
    with pytest.raises(ListenError, match=r"another process listens there; set another http.socket"):
        await page_server(scene, unix_socket=path).start()
    async with root.get("/healthz") as answer:
        assert answer.status == 200


async def test_a_path_that_can_not_be_used_is_reported(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(ListenError, match=r"a unix socket allows 107; set another http.socket"):
        await page_server(scene, unix_socket=tmp_path / ("x" * 120)).start()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "agent.sock"):
        with pytest.raises(ListenError, match=r"set another http.socket"):
            await page_server(scene, unix_socket=path).start()


async def test_orders(root: aiohttp.ClientSession, scene: Scene) -> None:
    async with root.post("/api/gpus/3/drain", json={"reason": "new fan", "evict": True, "again": True}) as answer:
        assert answer.status == 200
        assert await answer.json() == {"gpu": "3", "done": "drain"}
    for action in ("cordon", "uncordon", "reset"):
        async with root.post(f"/api/gpus/GPU-00000000%2D0/{action}") as answer:
            assert answer.status == 200
    assert scene.orders == [
        MaintenanceRequest(action="drain", gpu="3", reason="new fan", evict=True, again=True),
        MaintenanceRequest(action="cordon", gpu="GPU-00000000-0"),
        MaintenanceRequest(action="uncordon", gpu="GPU-00000000-0"),
        MaintenanceRequest(action="reset", gpu="GPU-00000000-0"),
    ]


@pytest.mark.parametrize(
    "body", [b"[]", b"{", b'{"evict": "yes"}', b'{"reason": null}', b'{"why": "typo"}', b"\xff\xfe", b'{"reason": "\xff"}']
)
async def test_an_order_that_can_not_be_read(root: aiohttp.ClientSession, scene: Scene, body: bytes) -> None:
    async with root.post("/api/gpus/3/drain", data=body) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"].startswith('the body is not of the form {"reason": "...", "evict": false}: ')
    assert scene.orders == []


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (Refusal("conflict", "GPU 3 is busy"), 409, {"error": "GPU 3 is busy", "code": "conflict"}),
        (InputError("there is no GPU 9"), 404, {"error": "there is no GPU 9"}),
        (NvmlError("the driver gave no answer"), 503, {"error": "the driver gave no answer"}),
        (KeyError("inside"), 500, {"error": "the server failed to respond; see its log"}),
    ],
)
async def test_an_order_that_is_not_followed(
    root: aiohttp.ClientSession, scene: Scene, error: Exception, status: int, told: dict[str, str]
) -> None:
    async def fail(_order: MaintenanceRequest) -> dict[str, str]:
        raise error

    scene.on_order = fail
    async with root.post("/api/gpus/3/reset") as answer:
        assert answer.status == status
        assert await answer.json() == told


async def test_a_maintenance_request_completes_after_the_client_disconnects(root: aiohttp.ClientSession, scene: Scene) -> None:
    begun, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work(_order: MaintenanceRequest) -> dict[str, str]:
        begun.set()
        await go.wait()
        done.set()
        return {}

    scene.on_order = work
    asking = asyncio.ensure_future(root.post("/api/gpus/3/drain"))
    await begun.wait()
    asking.cancel()
    await asyncio.sleep(0.05)
    go.set()
    await asyncio.wait_for(done.wait(), 30)


@pytest.mark.parametrize("source", ["127.0.0.1", REMOTE])
async def test_orders_come_by_no_other_way(serve: Serve, scene: Scene, source: str) -> None:
    order = get("/api/gpus/3/drain").replace(b"GET", b"POST", 1)
    status, told = parsed(await say((await serve()).address, order, source=source))
    assert (status, "unix socket" in told["error"], scene.orders) == (403, True, [])


async def test_an_order_can_not_be_read(root: aiohttp.ClientSession, scene: Scene) -> None:
    async with root.get("/api/gpus/3/drain") as answer:
        assert (answer.status, answer.headers["Allow"], scene.orders) == (405, "POST", [])
        assert await answer.json() == {"error": "/api/gpus/3/drain does not take GET: use POST"}
