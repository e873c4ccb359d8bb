"""The driver's sockets against a client that is not ours: registration, calls in both versions, health, and the end."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpumgr.aio import LatestValue
from gpumgr.dra.health import DeviceHealth, DraHealth
from gpumgr.dra.registration import SUPPORTED, DraLink, DraLinkTiming
from gpumgr.dra.service import DraPlugin

from .harness import DRIVER, PREPARED, REFUSAL, FakeClaims, call, connected, dra, get_info, health, notify

FAST = DraLinkTiming(poll_seconds=0.02, retry_seconds=0.05, silence_seconds=0.3)
HEALTHY = DeviceHealth(pool="node1", device="gpu-1", healthy=True)


class Driver:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.claims = FakeClaims()
        self.devices = LatestValue[tuple[DeviceHealth, ...]]((HEALTHY,))
        self.health = DraHealth(self.devices, repeat_seconds=0.2, wall_clock=lambda: 5.0)
        self.plugins, self.registry = folder / "plugins", folder / "registry"
        self.link = DraLink(
            self.plugins,
            self.registry,
            DRIVER,
            lambda: [DraPlugin(self.claims), self.health],
            end_streams=self.health.end_streams,
            timing=FAST,
            **options,
        )

    @property
    def socket(self) -> Path:
        return self.plugins / DRIVER / "dra.sock"

    @property
    def registry_socket(self) -> Path:
        return self.registry / f"{DRIVER}-reg.sock"

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 (files and the link's state have no event)
                await asyncio.sleep(0.01)


@pytest.fixture
async def driver(folder: Path) -> AsyncIterator[Driver]:
    made = Driver(folder)
    running = asyncio.create_task(made.link.run())
    await made.until(made.registry_socket.exists)
    yield made
    await made.link.stop(5.0)
    await running


async def test_the_kubelet_learns_name_socket_and_services(driver: Driver) -> None:
    info = await get_info(driver.registry_socket)
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", DRIVER, str(driver.socket))
    assert list(info.supported_versions) == SUPPORTED
    assert driver.socket.exists()


async def test_a_notification_registers_and_a_refusal_is_reported(driver: Driver) -> None:
    await notify(driver.registry_socket, registered=True)
    assert driver.link.registered
    assert driver.link.states[DRIVER].registrations == 1
    await notify(driver.registry_socket, registered=False, error="none of the versions are supported")
    assert not driver.link.registered
    assert "none of the versions are supported" in (driver.link.state.error or "")


async def test_a_kubelet_that_disconnects_has_lost_the_driver(driver: Driver) -> None:
    async with connected(driver.socket) as channel:
        await _prepare(channel, "v1", "a")
        await notify(driver.registry_socket, registered=True)
        await asyncio.sleep(0.1)
        assert driver.link.registered
    await driver.until(lambda: not driver.link.registered)


async def test_a_removed_socket_comes_back(driver: Driver) -> None:
    for path in (driver.socket, driver.registry_socket):
        path.unlink()
        await driver.until(path.exists)
        await get_info(driver.registry_socket)
        async with connected(driver.socket) as channel:
            await _prepare(channel, "v1", "a")


async def test_a_kubelet_that_does_not_call_is_reported(driver: Driver) -> None:
    await driver.until(lambda: "has not called" in (driver.link.state.error or ""))


async def test_a_file_in_place_of_the_socket_is_kept_and_reported(folder: Path) -> None:
    driver = Driver(folder)
    driver.registry.mkdir()
    driver.registry_socket.write_text("mine")
    running = asyncio.create_task(driver.link.run())
    await driver.until(lambda: "a file that is no socket" in (driver.link.state.error or ""))
    driver.registry_socket.unlink()
    await driver.until(driver.registry_socket.exists)
    await get_info(driver.registry_socket)
    await driver.link.stop(1.0)
    await running


async def test_instances_have_sockets_of_their_own_within_the_limit(folder: Path) -> None:
    driver = Driver(folder, instance="0b7c7a3e-5c1f-4f8e-9a52-0d1f8a1f6f11" * 2)
    running = asyncio.create_task(driver.link.run())
    await driver.until(lambda: driver.registry.exists() and list(driver.registry.iterdir()))
    (registry_socket,) = driver.registry.iterdir()
    info = await get_info(registry_socket)
    assert registry_socket.name != f"{DRIVER}-reg.sock"
    assert registry_socket.name.endswith("-reg.sock")
    assert max(len(os.fsencode(registry_socket)), len(info.endpoint)) <= 107
    async with connected(Path(info.endpoint)) as channel:
        await _prepare(channel, "v1", "a")
    await driver.link.stop(1.0)
    await running
    assert not list(driver.registry.iterdir())


# -- calls -----------------------------------------------------------------------------------------------------------------


async def _prepare(channel: grpc.aio.Channel, version: str, *uids: str) -> Any:
    claims = [dra.Claim(namespace="team", name=f"name-{uid}", uid=uid) for uid in uids]
    route = f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodePrepareResources"
    return await call(channel, route, dra.NodePrepareResourcesRequest(claims=claims), dra.NodePrepareResourcesResponse)


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_each_claim_has_its_own_result(driver: Driver, version: str) -> None:
    driver.claims.errors = {"refused": REFUSAL, "bug": RuntimeError("oops")}
    async with connected(driver.socket) as channel:
        answer = await _prepare(channel, version, "good", "refused", "bug")
    (device,) = answer.claims["good"].devices
    assert list(device.request_names) == ["gpu"]
    assert (device.pool_name, device.device_name, list(device.cdi_device_ids)) == ("node1", "gpu-1", list(PREPARED.cdi_ids))
    assert (device.share_id if device.HasField("share_id") else None) == ("share-1" if version == "v1" else None)
    assert answer.claims["good"].error == ""
    assert answer.claims["refused"].error == str(REFUSAL)
    assert "RuntimeError: oops" in answer.claims["bug"].error
    assert set(answer.claims) == {"good", "refused", "bug"}


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_unprepare(driver: Driver, version: str) -> None:
    driver.claims.errors = {"refused": REFUSAL}
    claims = [dra.Claim(namespace="team", name="n", uid=uid) for uid in ("good", "refused")]
    request = dra.NodeUnprepareResourcesRequest(claims=claims)
    route = f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodeUnprepareResources"
    async with connected(driver.socket) as channel:
        answer = await call(channel, route, request, dra.NodeUnprepareResourcesResponse)
    assert {uid: each.error for uid, each in answer.claims.items()} == {"good": "", "refused": str(REFUSAL)}
    assert [what for what, _ in driver.claims.calls] == ["unprepare", "unprepare"]


async def test_garbage_is_refused_with_a_sentence(driver: Driver) -> None:
    async with connected(driver.socket) as channel:
        method = channel.unary_unary("/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await method(b"\x0a\xff", timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "can't read this NodePrepareResourcesRequest" in (error.value.details() or "")


# -- health ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
async def test_health_is_sent_at_once_on_change_and_again(driver: Driver, version: str) -> None:
    async with connected(driver.socket) as channel:
        watch = channel.unary_stream(
            f"/{version}.DRAResourceHealth/NodeWatchResources",
            request_serializer=health.NodeWatchResourcesRequest.SerializeToString,
            response_deserializer=health.NodeWatchResourcesResponse.FromString,
        )(health.NodeWatchResourcesRequest())
        (first,) = (await watch.read()).devices
        assert (first.device.pool_name, first.device.device_name, first.health, first.last_updated_time) == (
            "node1",
            "gpu-1",
            1,
            5,
        )
        (again,) = (await watch.read()).devices
        assert again == first
        driver.devices.set((DeviceHealth(pool="node1", device="gpu-1", healthy=False, message="X" * 2000),))
        while (sick := (await watch.read()).devices[0]).health == 1:
            pass
        assert (sick.health, len(sick.message)) == (2, 1024)
        await driver.link.stop(5.0)
        while (end := await watch.read()) is not grpc.aio.EOF:
            assert end.devices
