"""The ResourceSlice on the real API server, with the rights and the policy of the chart."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.common.units import DRA_DRIVER
from gpumgr.kube.client import ApiServer
from gpumgr.kubelet.slice_publisher import SlicePublisher
from gpumgr.kubelet.slices import (
    SLICES,
    SliceDevice,
    Taint,
    dropped,
    resource_slice,
    slice_devices,
    slice_name,
)
from gpumgr.placement.devices import Gpu, NodeSnapshot
from tests.background import background
from tests.topologies import topology_from_matrix
from tools.chart import objects, render

from .api import refusal
from .cluster import Cluster
from .manifests import Json, container, pod
from .places import NODE, PROJECT
from .processes import stopped, wait_until

NAMESPACE, ACCOUNT = "kube-system", "dra-gpumgr"
KINDS = (
    *("ServiceAccount", "ClusterRole", "ClusterRoleBinding"),
    *("DeviceClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
)
REFUSED = "may only write ResourceSlices of its own node and of the driver gpu.gpumgr.io"


def devices(*taints: Taint, count: int = 16) -> tuple[SliceDevice, ...]:
    """GPUs with every attribute, some of the greatest length; the first has the taints."""
    gpus = tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{index:08x}",
            minor=index,
            bus_id=f"0000:{index + 16:02x}:00.0",
            model="NVIDIA A100-SXM4-80GB" if index else "é" * 40,
            memory_bytes=(81920 << 20) + index * 999,
            numa_node=index // 8,
            pcie_chain=("pci0000:16",),
        )
        for index in range(count)
    )
    matrix = [["X" if a == b else "NV2+NODE" if a // 4 == b // 4 else "SYS" for b in range(count)] for a in range(count)]
    node = NodeSnapshot(gpus=gpus, topology=topology_from_matrix(matrix), driver_version="580.95.05")
    names = {gpu.uuid: gpu.uuid[4:] for gpu in gpus}
    return slice_devices(node, names, enforcement="hami-core", taints={"00000000": taints})


class Access:
    """`agent` has the token of a pod on the node with the kubelet; so has `kubeconfig`."""

    def __init__(self, cluster: Cluster, agents_pod: Json) -> None:
        account = f"{NAMESPACE}/{ACCOUNT}"
        self.admin, self.kubeconfig = cluster.api, cluster.credentials(account, agents_pod)
        self.agent, self.agent_without_pod = cluster.api_of(account, agents_pod), cluster.api_of(account)

    def slice(self) -> Json | None:
        found: list[Json] = self.admin.request("GET", SLICES)["items"]
        return next((each for each in found if each["metadata"]["name"] == slice_name(NODE)), None)


@pytest.fixture(scope="module")
def access(cluster: Cluster) -> Iterator[Access]:
    rendered = objects(render({"settings": {"node": {"mode": "dra"}}}, "--kube-version=1.37.0", release="dra"))
    agents_pod = pod("dra-agent", [container()], serviceAccountName=ACCOUNT, nodeName=NODE)
    agents_pod["metadata"]["namespace"] = NAMESPACE
    with cluster.applied([each for (kind, _), each in rendered.items() if kind in KINDS]), ExitStack() as stack:
        cluster.api.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", agents_pod)
        stack.callback(cluster.kubectl, "delete", "pod", "dra-agent", f"--namespace={NAMESPACE}", "--grace-period=0", "--force")
        made = Access(cluster, agents_pod)
        for api in (made.agent, made.agent_without_pod):
            stack.enter_context(closing(api))
        other = resource_slice("another-node", "u-1", [])
        wait_until("the policy", lambda: REFUSED in refusal(made.agent.request, "POST", f"{SLICES}?dryRun=All", other), every=0.1)
        yield made


def test_a_slice_is_stored_whole_and_kept(access: Access, cluster: Cluster) -> None:
    sick = Taint(key=f"{DRA_DRIVER}/xid")
    # The kubelet deletes the slices of a driver 30 s after the end of its agent, which may have been that of an earlier test.
    with stopped(cluster.processes.pid("kubelet")):
        asyncio.run(_kept(access, devices(), devices(sick)))
    assert access.slice() is None


def taints_of(item: Json) -> list[tuple[str, list[str]]]:
    return [(each["name"], [taint["key"] for taint in each.get("taints", ())]) for each in item["spec"]["devices"]]


def publishing(server: ApiServer, devices: tuple[SliceDevice, ...]) -> SlicePublisher:
    publisher = SlicePublisher(server, NODE)
    publisher.offer(devices)
    publisher.follow(LinkState(registered=True, registrations=1))
    return publisher


async def _kept(access: Access, first: tuple[SliceDevice, ...], second: tuple[SliceDevice, ...]) -> None:
    server = await ApiServer.connect(access.kubeconfig)
    publisher = publishing(server, first)
    running = asyncio.create_task(publisher.run())

    async def stored(now: tuple[SliceDevice, ...]) -> Json:
        """Once these devices are published, with their taints."""
        async with asyncio.timeout(60):
            while True:
                found = await asyncio.to_thread(access.slice)
                if found is not None:
                    (owner,) = found["metadata"]["ownerReferences"]
                    sent = resource_slice(NODE, owner["uid"], now)
                    if taints_of(found) == taints_of(sent):
                        assert dropped(sent, found) is None
                        return found
                await asyncio.sleep(0.05)

    try:
        created = await stored(first)
        # The first write of a new process changes nothing.
        again = publishing(server, first)
        async with background(again.run()), asyncio.timeout(60):
            while not again.state.published:  # noqa: ASYNC110 (the state of a daemon)
                await asyncio.sleep(0.05)
            assert (await stored(first))["metadata"]["resourceVersion"] == created["metadata"]["resourceVersion"]
        publisher.offer(second)
        replaced = await stored(second)
        assert (replaced["metadata"]["uid"], publisher.state.dropped) == (created["metadata"]["uid"], None)
        assert replaced["spec"]["devices"][0]["taints"][0]["timeAdded"]
        assert publisher.state.error is None
        assert await publisher.withdraw(timeout_seconds=60.0) is True
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await server.close()
        await asyncio.sleep(0.25)  # aiohttp ends TLS connections a moment after it has closed them


def test_an_agent_writes_only_the_slice_of_its_node(access: Access) -> None:
    uid = access.admin.request("GET", f"/api/v1/nodes/{NODE}")["metadata"]["uid"]
    own, other = resource_slice(NODE, uid, devices()), resource_slice("another-node", "u-1", [])
    foreign = {**own, "spec": {**own["spec"], "driver": "gpu.nvidia.com"}}
    assert access.agent.request("POST", f"{SLICES}?dryRun=All", own)["spec"]["nodeName"] == NODE
    for body in (other, foreign):
        assert REFUSED in refusal(access.agent.request, "POST", SLICES, body)
    assert "the token of the gpumgr agent names no node" in refusal(access.agent_without_pod.request, "POST", SLICES, own)
    access.admin.request("POST", SLICES, other)
    path = f"{SLICES}/{slice_name('another-node')}"
    try:
        found = access.admin.request("GET", path)
        assert REFUSED in refusal(access.agent.request, "PUT", path, found)
        assert REFUSED in refusal(access.agent.request, "DELETE", path)
    finally:
        access.admin.request("DELETE", path)


def test_the_api_server_takes_the_examples(cluster: Cluster) -> None:
    for path in sorted((PROJECT / "config" / "examples").glob("dra-*.yaml")):
        cluster.kubectl("apply", "--dry-run=server", "--validate=strict", f"--filename={path}")
    for name in ("device-class", "admission-policy"):
        cluster.kubectl("apply", "--dry-run=server", "--validate=strict", f"--filename={PROJECT / 'config' / 'dra' / name}.yaml")
