"""The checks of a node in mode dra, at the stand-in API server."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final, Literal, cast

import pytest
from aiohttp import web
from msgspec.structs import replace

from gpumgr.cli.doctor import checks_for
from gpumgr.cli.examination import ok, skipped
from gpumgr.cli.examination.api_server import Right, look_at_claims, look_at_mode, look_at_slice, look_at_sockets, needed
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.common.units import DRA_DRIVER, Amounts
from gpumgr.driver import Hardware
from gpumgr.kubelet.slices import LOST_TAINT, Taint, resource_slice, slice_name
from gpumgr.ledger.ledger import Allocation, ClaimRequest, Ledger
from gpumgr.ledger.store import SqliteCheckpoint
from gpumgr.settings import Settings
from gpumgr.settings.schema import CheckpointSettings, KubeletSettings, KubernetesSettings, NodeSettings
from gpumgr.sim.apiserver import SimApiServer
from tests.component.kubelet.dra.resources import Resources
from tests.component.kubelet.dra.test_slice_publisher import DEVICES, device
from tests.component.ledger.conftest import GPU, REGISTRY

from .conftest import brief, listening

NODE = NodeSettings(name="node-1", mode="dra")
MODES: Final[tuple[Literal["plugin", "dra"], ...]] = ("plugin", "dra")


class Shown:
    """In place of SharedNvml."""

    gpus = tuple(each.gpu for each in DEVICES)

    async def snapshot(self) -> Any:
        return self


async def version(_request: web.Request) -> web.Response:
    return web.json_response({"gitVersion": "v1.37.2"})


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[tuple[Resources, Settings]]:
    sim = SimApiServer("node-1")
    sim.routes.append(web.get("/version", version))
    resources = Resources(sim)
    async with sim:
        kubernetes = KubernetesSettings(kubeconfig=sim.kubeconfig(tmp_path / "kubeconfig"))
        yield resources, Settings(node=NODE, kubernetes=kubernetes, checkpoint=CheckpointSettings(dir=tmp_path))


DIFFERS = "ResourceSlice {name} differs from the driver: "


LARGER = replace(DEVICES[1], gpu=replace(DEVICES[1].gpu, memory_bytes=40 << 30))
NO_SHARING = (
    "API server v1.37.2: the API server has dropped allowMultipleAllocations and requestPolicy from the ResourceSlice: the feature "
    "gate DRAConsumableCapacity is off, so GPUs can't be shared and none is offered"
)
NO_TAINTS = (
    "API server v1.37.2: the API server drops the taints of devices: the feature gate DRADeviceTaints is off, so GPUs that do not "
    "work or are cordoned are left out of the ResourceSlice instead"
)
LOST = device(2, taints=(Taint(key=LOST_TAINT),))


def shows(*devices: Any) -> Callable[[Resources], Any]:
    return lambda resources: resources.put(resource_slice("node-1", "uid", devices))


def lacks(gate: str) -> Callable[[Resources], Any]:
    return lambda resources: resources.without.add(gate)


@pytest.mark.parametrize(
    ("prepare", "state", "message"),
    [
        (shows(*DEVICES), "ok", "API server v1.37.2: 2 GPUs in {name}, 0 with taints"),
        (lambda _: None, "warning", "API server v1.37.2: the node has no ResourceSlice {name}"),
        (shows(DEVICES[0]), "warning", DIFFERS + "GPU-00000001 is not published"),
        (shows(*DEVICES, device(2)), "warning", DIFFERS + "the driver does not list GPU-00000002"),
        (shows(*DEVICES, LOST), "ok", "API server v1.37.2: 3 GPUs in {name}, 1 with taints"),
        (shows(DEVICES[0], LARGER), "warning", DIFFERS + "GPU-00000001 has 160 blocks of memory in place of 320"),
        (lacks("DRAConsumableCapacity"), "error", NO_SHARING),
        (lacks("DRADeviceTaints"), "warning", NO_TAINTS),
        (lacks("resource.k8s.io/v1"), "error", "the API server (v1.37.2) has no resource.k8s.io/v1"),
    ],
)
async def test_the_slice(prepare: Callable[[Resources], Any], state: str, message: str, stage: Any) -> None:
    resources, settings = stage
    prepare(resources)
    found = await look_at_slice(settings, cast("SharedNvml", Shown()))
    assert brief(found) == (state, message.format(name=slice_name("node-1")))
    assert (found.remedy is None) == (state == "ok")
    assert not resources.writes  # nothing but dry runs


async def test_claims_that_the_api_server_lacks(stage: Any, tmp_path: Path) -> None:
    resources, settings = stage
    assert await look_at_claims(settings) == ok("0 claims hold GPUs")
    ledger = Ledger(REGISTRY)
    for name in ("kept", "gone", "another"):
        claim = ClaimRequest(uid=f"uid-{name}", namespace="team", name=name, request="gpu")
        ledger = ledger.occupy(Allocation(id=f"id-{name}", gpus={GPU: Amounts(10, 512)}, claim=claim))
    checkpoint = SqliteCheckpoint.open(tmp_path)
    await checkpoint.save(ledger.since(Ledger()))
    await checkpoint.close()
    resources.claims = {("team", name): {"metadata": {"uid": f"uid-{name}"}} for name in ("kept", "gone", "another")}
    assert await look_at_claims(settings) == ok("3 claims hold GPUs")
    del resources.claims["team", "gone"]
    resources.claims["team", "another"]["metadata"]["uid"] = "uid-later"
    missing = "these claims hold GPUs, but do not exist in the API server: team/another, team/gone"
    assert brief(await look_at_claims(settings)) == ("warning", missing)


async def test_the_sockets(folder: Path) -> None:
    kubelet = KubeletSettings(plugins_dir=folder / "p", plugins_registry_dir=folder / "r")
    kubelet.plugins_dir.mkdir()
    assert brief(look_at_sockets(kubelet)) == ("error", f"{folder}/r is no folder")
    kubelet.plugins_registry_dir.mkdir()
    (folder / "p" / DRA_DRIVER).mkdir()
    dra, registration = folder / "p" / DRA_DRIVER / "dra.sock", folder / "r" / f"{DRA_DRIVER}-reg.sock"
    with listening(dra):
        away = f"the driver {DRA_DRIVER} does not listen at {folder}/r/{DRA_DRIVER}-*reg.sock"
        assert brief(look_at_sockets(kubelet)) == ("warning", away)
        with listening(registration):
            assert look_at_sockets(kubelet) == ok(f"the driver {DRA_DRIVER} listens at {dra} and {registration}")


def test_checks_of_the_mode() -> None:
    names = {mode: {check.name for check in checks_for(Settings(node=NodeSettings(mode=mode)), Hardware())} for mode in MODES}
    assert "mode" in names["plugin"] & names["dra"]
    assert names["plugin"] - names["dra"] == {"kubelet"}
    assert names["dra"] - names["plugin"] == {"dra-sockets", "dra-slice", "dra-claims"}
    assert Right(verb="patch", resource="pods") in set(needed(Settings(node=NODE)))


async def test_the_mode_is_shown() -> None:
    assert await look_at_mode("dra") == ok("dra: GPUs are offered to ResourceClaims")


async def test_standalone_there_is_neither_a_slice_nor_a_claim() -> None:
    settings = Settings(node=NODE, kubernetes=KubernetesSettings(enabled=False))
    found = await look_at_slice(settings, cast("SharedNvml", Shown()))
    assert brief(found) == ("error", "node.mode dra needs the API server")
    assert await look_at_claims(settings) == skipped("node.mode dra needs the API server")
