"""Two replicas of the extender behind a real kube-scheduler, over TLS with client certificates. A forwarder is the Service: it leads each
connection to the pod with the leader's label. The pods exist in the API alone; their processes run here."""

import contextlib
import json
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from .agent import Agent
from .api import ApiError
from .cluster import Cluster
from .manifests import container, pod
from .node import cleared
from .places import PROJECT
from .processes import free_ports, wait_listening, wait_until
from .scheduling import Scheduled, api_nodes, filter_status, rights, start_kube_scheduler, start_replica

CERTIFICATES: Final = PROJECT / "tests" / "component" / "web" / "certificates"
LABEL: Final = "gpumgr.io/scheduler-leader"
PODS: Final = "/api/v1/namespaces/kube-system/pods"
LEASE: Final = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/gpumgr-scheduler"
REPLICAS: Final = ("extender-a", "extender-b")
TLS: Final = {
    "enableHTTPS": True,
    "tlsConfig": {
        "caFile": str(CERTIFICATES / "ca.crt"),
        "certFile": str(CERTIFICATES / "client.crt"),
        "keyFile": str(CERTIFICATES / "client.key"),
    },
}


class Replicas:
    """The processes of the extender, and the Service in front of them."""

    def __init__(self, cluster: Cluster, credentials: Path) -> None:
        self._cluster, self._credentials = cluster, credentials
        self.ports = dict(zip(REPLICAS, free_ports(2), strict=True))
        self._service = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"https://127.0.0.1:{self._service.getsockname()[1]}/scheduler"
        threading.Thread(target=self._accept, daemon=True).start()

    def start(self, name: str) -> None:
        files = {"tls_cert_file": "server.crt", "tls_key_file": "server.key", "client_ca_file": "ca.crt"}
        settings = [f"scheduler.{key}={CERTIFICATES / file}" for key, file in files.items()]
        settings += ["scheduler.leader_election=true", "scheduler.client_names=[client]", "http.port=0"]
        start_replica(self._cluster, name, self._credentials, self.ports[name], *settings, pod=name, tls=True)

    def leaders(self) -> list[str]:
        """The pods with the label."""
        return [each["metadata"]["name"] for each in self._cluster.api.request("GET", f"{PODS}?labelSelector={LABEL}")["items"]]

    def wait_leader(self, *, other_than: str | None = None) -> str:
        def leader() -> str | None:
            found = self.leaders()
            return found[0] if len(found) == 1 and found != [other_than] else None

        return wait_until("a leader", leader)

    def waits(self, name: str) -> bool:
        """Whether the replica listens, and knows that it does not lead."""
        context = ssl.create_default_context(cafile=CERTIFICATES / "ca.crt")
        context.load_cert_chain(CERTIFICATES / "client.crt", CERTIFICATES / "client.key")
        return filter_status(self.ports[name], context) == 503

    def close(self) -> None:
        self._service.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._service.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ApiError, IndexError), selectors.DefaultSelector() as ends:
            found = self._leader_port()
            with socket.create_connection(("127.0.0.1", found)) as server:
                ends.register(client, selectors.EVENT_READ, server)
                ends.register(server, selectors.EVENT_READ, client)
                while True:
                    for key, _ in ends.select():
                        source, target = key.fileobj, key.data
                        assert isinstance(source, socket.socket)
                        if not (data := source.recv(1 << 16)):
                            return
                        target.sendall(data)

    def _leader_port(self) -> int:
        """The shared connection is the test's own."""
        api = self._cluster.api
        with contextlib.closing(api.connect()) as connection:
            found = json.loads(api.send(connection, "GET", f"{PODS}?labelSelector={LABEL}").read())
        return self.ports[found["items"][0]["metadata"]["name"]]


@pytest.fixture(scope="module")
def replicas(cluster: Cluster, running_agent: Agent) -> Iterator[Replicas]:
    with cleared(cluster, running_agent):
        running_agent.stop()
    wait_until("no pods", lambda: not cluster.pods.all())
    with rights(cluster) as credentials, api_nodes(cluster):
        for name in REPLICAS:
            made = pod(name, [container("extender")], bound=False, schedulerName="none", serviceAccountName="gpumgr-scheduler")
            made["metadata"]["namespace"] = "kube-system"
            cluster.api.request("POST", PODS, made)
        both = Replicas(cluster, credentials)
        try:
            for name in REPLICAS:
                both.start(name)
            for name in REPLICAS:
                wait_listening(both.ports[name])
            both.wait_leader()
            start_kube_scheduler(cluster, {"urlPrefix": both.url, **TLS})
            yield both
        finally:
            for name in ("gpu-kube-scheduler", *REPLICAS):
                cluster.processes.stop(name)
            both.close()
            for path in (*(f"{PODS}/{name}?gracePeriodSeconds=0" for name in REPLICAS), LEASE):
                cluster.api.request("DELETE", path)


@pytest.fixture
def pods(cluster: Cluster) -> Iterator[Scheduled]:
    scheduled = Scheduled(cluster)
    try:
        yield scheduled
    finally:
        scheduled.end_all()


def test_a_leader_that_is_killed_or_stopped_is_replaced_in_a_stream_of_pods(
    cluster: Cluster, replicas: Replicas, pods: Scheduled
) -> None:
    """One that is stopped hands over at once. Ten GPUs have room for 20 pods, half of a GPU each."""
    leader = replicas.wait_leader()
    (other,) = set(REPLICAS) - {leader}
    names = [f"stream-{number}" for number in range(20)]
    for name in names[:10]:
        pods.create(name, (50, 32))
        if name == "stream-5":
            cluster.processes.kill(leader)
        time.sleep(0.02)  # a stream: the kill meets pods in all states
    wait_until("ten pods bound", lambda: all(pods.node_of(name) for name in names[:10]), 120)
    assert replicas.wait_leader(other_than=leader) == other, "the dead leader's label was removed"
    replicas.start(leader)
    wait_until("the other replica", lambda: replicas.waits(leader))
    for name in names[10:15]:
        pods.create(name, (50, 32))
    assert cluster.processes.stop(other) == 0
    released = cluster.api.request("GET", LEASE)["spec"]
    assert released.get("holderIdentity", "").partition("_")[0] in ("", leader), "the Lease is not left to expire"
    assert "lease_released" in cluster.processes.tail(other)
    for name in names[15:]:
        pods.create(name, (50, 32))
    wait_until("all pods bound", lambda: all(pods.node_of(name) for name in names), 120)
    assert set(Counter(pods.placed(name)[1][0][0] for name in names).values()) == {2}
    assert replicas.leaders() == [leader]
