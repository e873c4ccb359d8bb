"""The registration, with kubelets that come late, restart, refuse, hang, and with sockets that others remove; the sockets' names."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr._pb.pluginregistration import RegistrationStatus
from gpumgr.common.aio import LatestValue
from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.kubelet.dra_registration import DraLink, socket_paths
from gpumgr.kubelet.dra_service import DraHealth
from tests.background import until
from tests.component.kubelet.dra.harness import DRIVER, POOL, QUICK, Caller, Linked, StubKubelet, claim, linked, plugin_of

REGISTRATION = f"{DRIVER}-reg.sock"


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


@pytest.fixture
async def one(folder: Path) -> AsyncIterator[Linked]:
    async with linked(folder) as made:
        yield made


@pytest.fixture
async def registered(one: Linked) -> Linked:
    await one.kubelet.register()
    return one


async def test_a_kubelet_registers_the_driver(folder: Path) -> None:
    async with linked(folder, services=lambda claims: [plugin_of(claims), DraHealth(POOL, LatestValue({}))]) as one:
        connection = await one.kubelet.register()
        info = await one.kubelet.info()
        assert (info.type, info.name, info.endpoint) == ("DRAPlugin", DRIVER, f"{one.kubelet.plugins}/{DRIVER}/dra.sock")
        assert list(info.supported_versions) == [
            "v1.DRAPlugin",
            "v1beta1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth",
        ]
        assert one.link.state == LinkState(registered=True, registrations=1)
        assert one.states[-1] == one.link.state
        assert list((await Caller(connection).prepare(claim("a"))).claims) == ["uid-a"]
        await one.link.stop(1)
        assert one.kubelet.sockets() == []
        assert one.states[-1] == LinkState(registered=False, registrations=1)


async def test_a_restarted_kubelet_registers_again(registered: Linked) -> None:
    with capture_logs() as logs:
        await registered.kubelet.end()
        await registered.until(lambda state: not state.registered)
    assert "the kubelet closed its connection to" in str(registered.link.state.error)
    assert [(line["event"], line["reason"]) for line in logs] == [("registration_lost", registered.link.state.error)]
    await registered.kubelet.register()
    assert registered.link.state == LinkState(registered=True, registrations=2)
    assert registered.states[-1] == registered.link.state


async def test_a_new_connection_alone_is_the_old_registration(one: Linked) -> None:
    connection = await one.kubelet.register()
    await one.kubelet.end()
    await one.until(lambda state: not state.registered)
    connection = grpc.aio.insecure_channel(f"unix:{one.kubelet.plugins}/{DRIVER}/dra.sock")
    await Caller(connection).prepare()
    await one.until(lambda state: state == LinkState(registered=True, registrations=1))
    await connection.close()


async def test_a_kubelet_that_ends_at_once_is_noticed(one: Linked) -> None:
    await one.kubelet.register(hang_up=True)
    await one.until(lambda state: not state.registered)


async def test_a_refusal_has_the_kubelets_sentence_and_is_logged_once(folder: Path) -> None:
    sentence = 'none of services supported by the plugin (["v1.DRAPlugin"]) are supported by the kubelet (["v2.DRAPlugin"])'
    async with linked(folder) as one:
        with capture_logs() as logs:
            for _ in range(3):
                await one.kubelet.register(error=sentence)
        [line] = logs
        assert (line["event"], line["error"]) == ("registration_failed", one.link.state.error)
        assert f"refuses the driver {DRIVER}: {sentence}; the node needs Kubernetes 1.34 or newer" in line["error"]
        assert not one.link.state.registered
        await one.kubelet.register()
        assert one.link.state == LinkState(registered=True, registrations=1)


async def test_a_kubelet_that_does_not_call_is_reported_once(folder: Path) -> None:
    with capture_logs() as logs:
        async with linked(folder, timing=replace(QUICK, patience_seconds=0.1)) as one:
            await one.until(lambda state: "has not registered the driver at" in str(state.error))
            await asyncio.sleep(0.1)
            assert "start the kubelet, or give gpumgr the folders" in str(one.link.state.error)
            await one.kubelet.register()
            assert one.link.state == LinkState(registered=True, registrations=1)
    assert [line["event"] for line in logs].count("registration_failed") == 1


async def test_a_callback_that_fails_does_not_undo_the_registration(folder: Path) -> None:
    """The kubelet takes an error of this answer for that of the driver."""
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
    link = DraLink(folder, folder, [])
    link.on_state = lambda _state: 1 / 0  # type: ignore[assignment]
    assert await link._notified(bytes(RegistrationStatus(plugin_registered=True))) == b""
    await asyncio.sleep(0)
    assert [type(each) for each in reported] == [ZeroDivisionError]
    assert link.state.registered


async def test_the_registration_socket_is_made_again_and_registered(registered: Linked) -> None:
    (registered.kubelet.registry / REGISTRATION).unlink()
    with capture_logs() as logs:
        await registered.until(lambda state: not state.registered)
    assert [line["event"] for line in logs] == ["socket_made_again", "registration_lost"]
    await registered.kubelet.register()
    assert registered.link.state == LinkState(registered=True, registrations=2)


@pytest.mark.parametrize("how", ["removed", "replaced", "folder removed"])
async def test_the_dra_socket_is_made_again_and_calls_go_on(one: Linked, how: str) -> None:
    connection = await one.kubelet.register()
    one.claims.hold = asyncio.Event()
    running = Caller(connection).prepare(claim("a"))
    await one.claims.until_began()
    path = one.kubelet.plugins / DRIVER / "dra.sock"
    path.unlink()
    if how == "replaced":
        dead_socket(path)
    if how == "folder removed":
        path.parent.rmdir()
    await until(lambda: one.link._dra.in_place)
    one.claims.hold.set()
    assert list((await running).claims) == ["uid-a"]
    async with grpc.aio.insecure_channel(f"unix:{path}") as second:
        assert list((await Caller(second).prepare(claim("b"))).claims) == ["uid-b"]
    assert one.link.state == LinkState(registered=True, registrations=1)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (f"plugins_registry/{REGISTRATION}", "can't listen on {path}: a file that is no socket is there; remove it"),
        (f"plugins/{DRIVER}/dra.sock", "can't listen on {path}: a file that is no socket is there; remove it"),
        (f"plugins/{DRIVER}", "can't make the folder {path}: File exists"),
    ],
)
async def test_other_files_are_kept_and_reported(folder: Path, place: str, problem: str) -> None:
    StubKubelet(folder)
    path = folder / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    with capture_logs() as logs:
        async with linked(folder) as one:
            await one.until(lambda state: problem.format(path=path) in str(state.error))
            assert path.read_text() == "precious"
            path.unlink()
            await one.kubelet.register()
            await one.until(lambda state: state == LinkState(registered=True, registrations=1))
    assert [line["event"] for line in logs].count("registration_failed") == 1


@pytest.mark.parametrize("name", ["plugins", "plugins_registry"])
async def test_a_missing_folder_is_reported_until_it_is_there(folder: Path, name: str) -> None:
    async with linked(folder) as one:
        (folder / name).rmdir()  # the link has not run yet
        await one.until(lambda state: f"the folder {folder / name} does not exist; start the kubelet" in str(state.error))
        (folder / name).mkdir()
        await one.kubelet.register()
        await one.until(lambda state: state.registered and state.error is None)


async def test_leftovers_are_removed_and_living_sockets_stay(folder: Path) -> None:
    kubelet = StubKubelet(folder)
    paths = {name: socket_paths(kubelet.plugins, kubelet.registry, name) for name in ("old", "new", "gone")}
    mine = {name: [path.name for path in each] for name, each in paths.items()}
    async with linked(folder, instance="old") as old:
        await old.kubelet.register(mine["old"][1])
        others = ["other.io-reg.sock", f"{DRIVER}x-reg.sock"]
        for path in (kubelet.plugins / DRIVER / "dra.sock", *paths["gone"]):
            dead_socket(path)
        for name in (REGISTRATION, *others):
            dead_socket(kubelet.registry / name)
        async with linked(folder, instance="new") as new:
            await new.kubelet.register(mine["new"][1])
            assert kubelet.sockets() == sorted([*mine["old"], *mine["new"], *others])
            assert old.link.state.registered
            assert new.link.state.registered
            for name, (dra, registration) in mine.items():
                if name != "gone":
                    assert Path((await kubelet.info(registration)).endpoint).name == dra
        assert kubelet.sockets() == sorted([*mine["old"], *others])


@pytest.mark.parametrize("instance", [None, "pod"])
async def test_the_sockets_of_a_killed_process_are_replaced_and_stay_after_a_kill(folder: Path, instance: str | None) -> None:
    kubelet = StubKubelet(folder)
    (kubelet.plugins / DRIVER).mkdir()
    paths = socket_paths(kubelet.plugins, kubelet.registry, instance)
    for path in paths:
        dead_socket(path)
    async with linked(folder, instance=instance) as one:
        await one.kubelet.register(paths[1].name)
        assert one.link.state.registered
        assert os.stat(paths[1]).st_mode & 0o777 == 0o600
        daemon = one.link._daemon
        assert daemon is not None
        daemon.cancel()
        await asyncio.wait([daemon])
        assert kubelet.sockets() == [path.name for path in paths]


async def test_a_stop_unregisters_first_and_lets_calls_end(one: Linked) -> None:
    connection = await one.kubelet.register()
    one.claims.hold = asyncio.Event()
    running = Caller(connection).prepare(claim("a"))
    await one.claims.until_began()
    stopping = asyncio.create_task(one.link.stop(30))
    await until(lambda: not one.kubelet.sockets())
    await one.until(lambda state: not state.registered)
    assert not stopping.done()
    one.claims.hold.set()
    assert list((await running).claims) == ["uid-a"]
    with capture_logs() as logs:
        await stopping
    assert (one.link.state.registered, logs) == (False, [])


KUBELET = Path("/var/lib/kubelet")


def names(instance: str | None) -> tuple[str, str]:
    dra, registration = socket_paths(KUBELET / "plugins", KUBELET / "plugins_registry", instance)
    assert (dra.parent, registration.parent) == (KUBELET / "plugins/gpu.gpumgr.io", KUBELET / "plugins_registry")
    assert max(len(os.fsencode(path)) for path in (dra, registration)) <= 107
    return dra.name, registration.name


def test_names() -> None:
    assert names(None) == ("dra.sock", "gpu.gpumgr.io-reg.sock")
    assert names("a/b") == ("dra-c14cddc033f64b9d.sock", "gpu.gpumgr.io-c14cddc033f64b9d-reg.sock")


@given(st.text(min_size=1, max_size=150))
def test_every_instance_has_paths_that_fit_and_no_other_has_them(instance: str) -> None:
    assert names(instance) != names(instance + "x") != names(None)


def test_relative_folders_become_absolute() -> None:
    assert all(path.is_absolute() for path in socket_paths(Path("plugins"), Path("registry"), None))
