"""A one-node Kubernetes cluster of real parts: containerd, etcd, API server, scheduler, kubelet. All on 127.0.0.1."""

import fcntl
import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import grpc

from . import build, image, manifests, traces
from .api import NAMESPACE, PODS, Api, ApiError, Pods
from .manifests import Json
from .places import (
    AUDIT_LOG,
    CONTAINERD_SOCKET,
    DEVICE_PLUGINS,
    IMAGE,
    KUBELET_ROOT,
    KUBERNETES,
    LOCK,
    NODE,
    OLDER_KUBELET,
    STATE,
)
from .processes import Processes, free_ports, wait_until, written


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSoftware:
    """`runtime` is the folder of containerd, its shim and ctr; `state` is the folder of its images and containers, which is not shared."""

    kubelet: Path
    kubelet_version: str
    runtime: Path
    state: Path


def current_software(binaries: Path) -> NodeSoftware:
    """What is built from Go modules; `binaries` is the folder of the builds."""
    kubelet, runtime = binaries / "kubernetes" / "kubelet", binaries / "containerd"
    return NodeSoftware(kubelet=kubelet, kubelet_version=KUBERNETES, runtime=runtime, state=STATE / "containerd")


def older_software(binaries: Path) -> NodeSoftware:
    """The last kubelet that accepts containerd 1.x, with Debian's containerd, which has no CDI."""
    kubelet, runtime = binaries / "older" / "kubelet", Path("/usr/bin")
    return NodeSoftware(kubelet=kubelet, kubelet_version=OLDER_KUBELET, runtime=runtime, state=STATE / "containerd-debian")


ADMISSION_OFF = "TaintNodesByCondition"  # only the controller manager takes its taints away, and few tests have one


class Cluster:
    """Start it, use it, stop it; `stop` removes everything that `start` made."""

    api: Api
    pods: Pods

    def __init__(self) -> None:
        self._lock: IO[str] | None = None
        #: The runtime's folder, and the archive of an image that is in it.
        self._imported: set[tuple[Path, Path]] = set()
        #: The node's last heartbeat when its kubelet was last stopped for a restart.
        self._heartbeat: str | None = None
        self._etcd, self._peer, self._server, self._kubelet = free_ports(4)
        self._tokens = {name: secrets.token_hex(16) for name in ("admin", "node", "gpumgr")}
        self.processes = Processes(STATE / "logs", traces.RECORD)
        self.url = f"https://127.0.0.1:{self._server}"

    # -- life

    def start(self) -> None:
        """Installs and builds what is missing, cleans up after a killed run, starts everything, waits for the node."""
        if os.geteuid() != 0:
            raise PermissionError("the end-to-end cluster needs root")
        build.install_packages()
        self.binaries = build.build()
        self._software = current_software(self.binaries)
        self._claim()
        try:
            self._start_runtime()
            self._start_control_plane()
            self.start_kubelet()
            self.wait_ready()
            self.pods = Pods(Api(self._server, self._authority, self._tokens["admin"]))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the processes and removes every trace."""
        if hasattr(self, "pods"):
            self.pods.stop()
        if hasattr(self, "api"):
            self.api.close()
        self.processes.kill_all()
        traces.remove()
        if self._lock is not None:
            LOCK.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def _claim(self) -> None:
        """Takes the lock, removes what a killed run left, and lays out the folders."""
        lock = LOCK.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock.fileno()), LOCK.stat()):
                raise FileNotFoundError  # the holder has just removed it
        except OSError:
            lock.close()
            raise traces.OccupiedError(f"another end-to-end run holds {LOCK}") from None
        self._lock = lock
        traces.remove()
        traces.check_free()
        for name in ("logs", "pki", "cni", "pod-logs"):
            (STATE / name).mkdir(parents=True)
        traces.claim_folders()
        traces.make_devices(gpus=8)

    # -- parts

    @property
    def _authority(self) -> Path:
        return STATE / "pki" / "apiserver.crt"

    def token_of(self, account: str, pod: Json | None = None) -> str:
        """A token of a service account, `NAMESPACE/NAME`; bound to a pod, as the tokens in pods are."""
        namespace, _, name = account.partition("/")
        bound = {} if pod is None else {"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"]}}
        asked: Json = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": bound}
        made = self.api.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", asked)
        return str(made["status"]["token"])

    def api_of(self, account: str, pod: Json | None = None) -> Api:
        """Access with such a token."""
        return Api(self._server, self._authority, self.token_of(account, pod))

    def admin(self) -> Api:
        """Access of its own to everything, for another thread."""
        return Api(self._server, self._authority, self._tokens["admin"])

    def kubeconfig(self, name: str) -> Path:
        """Kubeconfig file of `admin` (everything), `node` (the kubelet) or `gpumgr` (the agent)."""
        return self._kubeconfig(name, self._tokens[name])

    def credentials(self, account: str, pod: Json | None = None) -> Path:
        """Kubeconfig file of a service account, as `token_of`."""
        return self._kubeconfig(account.replace("/", "-"), self.token_of(account, pod))

    def _kubeconfig(self, name: str, token: str) -> Path:
        path = STATE / f"{name}.kubeconfig"
        text = json.dumps(manifests.kubeconfig(self.url, str(self._authority), token))
        if not path.exists() or path.read_text() != text:  # a process may be reading it
            path.touch(mode=0o600)
            path.write_text(text)
        return path

    @contextmanager
    def account(self, account: str, *roles: str) -> Iterator[Api]:
        """A service account, `NAMESPACE/NAME`, with these ClusterRoles, and its access, while the block lasts."""
        namespace, _, name = account.partition("/")
        subject = f"--serviceaccount={namespace}:{name}"
        with ExitStack() as stack:
            self.kubectl("create", "serviceaccount", name, f"--namespace={namespace}")
            stack.callback(self.kubectl, "delete", "serviceaccount", name, f"--namespace={namespace}")
            for role in roles:
                self.kubectl("create", "clusterrolebinding", f"{name}-{role}", f"--clusterrole={role}", subject)
                stack.callback(self.kubectl, "delete", "clusterrolebinding", f"{name}-{role}")
            yield stack.enter_context(closing(self.api_of(account)))

    def _start_runtime(self) -> None:
        (STATE / "cni" / "10-none.conflist").write_text(json.dumps(manifests.CNI))
        self.start_containerd()
        client, peer = f"http://127.0.0.1:{self._etcd}", f"http://127.0.0.1:{self._peer}"
        self.processes.start(
            "etcd",
            ["etcd", "--data-dir", STATE / "etcd", "--listen-client-urls", client, "--advertise-client-urls", client,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
             *("--heartbeat-interval=1000", "--election-timeout=10000")],  # it is alone: a stall is no reason to elect
        )  # fmt: skip

    def start_containerd(self) -> None:
        """Starts the container runtime; images and containers are those of its folder."""
        software = self._software
        config = software.state.with_suffix(".toml")
        config.write_text(manifests.containerd_config(software.state))
        command: list[str | Path] = [software.runtime / "containerd", "--config", config]
        self.processes.start("containerd", command, {"PATH": f"{software.runtime}:{os.environ['PATH']}"})  # it has the shim

    def wait_containerd(self) -> None:
        """Waits until the container runtime answers the kubelet's kind of calls; its socket is there before that."""
        with grpc.insecure_channel(f"unix://{CONTAINERD_SOCKET}") as channel:
            version = channel.unary_unary("/runtime.v1.RuntimeService/Version")

            def answers() -> bool:
                try:
                    version(b"", timeout=5.0)
                except grpc.RpcError:
                    return False
                return True

            wait_until("the container runtime", answers, 120)

    def import_image(self, archive: Path) -> None:
        """Gives the container runtime an image, unless this run has done it before: images outlive the runtime's process."""
        self.wait_containerd()
        if (self._software.state, archive) not in self._imported:
            self.ctr("images", "import", str(archive))
            self._imported.add((self._software.state, archive))

    def _import_image(self) -> None:
        """The image of the tests' pods."""
        archive = STATE / "image.tar"
        if not archive.exists():
            image.write_image(archive, IMAGE, ["/bin/sh", "-c", manifests.SLEEP])
        self.import_image(archive)

    def _start_control_plane(self) -> None:
        key = STATE / "pki" / "accounts.key"
        subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key], check=True)
        users = STATE / "pki" / "tokens.csv"
        users.touch(mode=0o600)
        users.write_text(
            f'{self._tokens["admin"]},admin,1,"system:masters"\n'
            f'{self._tokens["node"]},system:node:{NODE},2,"system:nodes"\n'
            f"{self._tokens['gpumgr']},gpumgr,3,\n"
        )
        self.processes.start(
            "kube-apiserver",
            [self.binaries / "kubernetes" / "kube-apiserver",
             f"--etcd-servers=http://127.0.0.1:{self._etcd}", f"--secure-port={self._server}",
             "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
             f"--cert-dir={STATE / 'pki'}", f"--token-auth-file={users}", "--authorization-mode=Node,RBAC",
             f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
             "--service-account-issuer=https://e2e.invalid", "--service-cluster-ip-range=10.96.0.0/24",
             f"--audit-policy-file={self._audit_policy()}", f"--audit-log-path={AUDIT_LOG}",
             f"--disable-admission-plugins={ADMISSION_OFF}", "--allow-privileged=true"],
        )  # fmt: skip
        self._import_image()
        wait_until("the API server", self._api_ready, 180, every=0.2)
        self.processes.start(
            "kube-scheduler",
            [self.binaries / "kubernetes" / "kube-scheduler", f"--kubeconfig={self.kubeconfig('admin')}",
             "--leader-elect=false", "--secure-port=0"],
        )  # fmt: skip
        # The API server makes the namespaces of a new cluster after it has said that it is ready.
        wait_until("the cluster's namespaces", lambda: {NAMESPACE, "kube-system"} <= self._namespaces(), every=0.1)
        for path, body in manifests.agent_rights():
            self.api.request("POST", path, body)
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        self.api.request("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", account)

    def _namespaces(self) -> set[str]:
        return {str(each["metadata"]["name"]) for each in self.api.request("GET", "/api/v1/namespaces")["items"]}

    def _audit_policy(self) -> Path:
        path = STATE / "audit.yaml"
        path.write_text(json.dumps(manifests.AUDIT))
        return path

    def start_controllers(self, *arguments: str) -> None:
        """Starts what makes pods of DaemonSets and Deployments, claims, and namespaces' accounts."""
        self.processes.start(
            "kube-controller-manager",
            [self.binaries / "controllers" / "kube-controller-manager", f"--kubeconfig={self.kubeconfig('admin')}",
             f"--controllers={','.join(manifests.CONTROLLERS)}", "--leader-elect=false", "--secure-port=0",
             f"--root-ca-file={self._authority}", f"--service-account-private-key-file={STATE / 'pki' / 'accounts.key'}",
             *arguments],
        )  # fmt: skip

    def stop_controllers(self) -> None:
        """Ends them: the other tests' pods have no owner, and their DaemonSets are to stay on paper."""
        self.processes.stop("kube-controller-manager")

    def _api_ready(self) -> bool:
        self.processes.check("kube-apiserver")
        self.processes.check("etcd")
        if not self._authority.exists():
            return False
        try:
            if not hasattr(self, "api"):
                self.api = Api(self._server, self._authority, self._tokens["admin"])
            self.api.request("GET", "/readyz")
        except (OSError, http.client.HTTPException, ApiError):
            return False
        return True

    # -- the kubelet

    def start_kubelet(self) -> None:
        """Starts the kubelet and waits until its device manager listens."""
        config = STATE / "kubelet.yaml"
        config.write_text(json.dumps(manifests.kubelet_config(self._kubelet)))
        self.processes.start(
            "kubelet",
            [self._software.kubelet, f"--config={config}", f"--kubeconfig={self.kubeconfig('node')}",
             f"--hostname-override={NODE}", f"--root-dir={KUBELET_ROOT}", f"--cert-dir={KUBELET_ROOT / 'pki'}"],
        )  # fmt: skip
        wait_until("the kubelet's device manager", self._listens, 120)

    @contextmanager
    def older_node(self) -> Iterator[None]:
        """Runs an older kubelet and container runtime on the node, which must have no pods; the usual ones again afterwards."""
        usual = self._software
        self._replace_software(older_software(self.binaries))
        try:
            yield
        finally:
            self.delete_all()
            self._replace_software(usual)

    def _replace_software(self, software: NodeSoftware) -> None:
        for name in ("kubelet", "containerd"):
            self.processes.stop(name)
        self._software = software
        self.start_containerd()
        self._import_image()
        self.start_kubelet()
        version = f"v{software.kubelet_version}"
        wait_until(f"kubelet {version}", lambda: self.node()["status"]["nodeInfo"]["kubeletVersion"] == version)
        self.wait_ready()

    def _listens(self) -> bool:
        self.processes.check("kubelet")
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(DEVICE_PLUGINS / "kubelet.sock")) == 0

    def kubelet_restart(self) -> None:
        """Stops and starts the kubelet; returns when its new socket listens."""
        self.processes.stop("kubelet")
        self._heartbeat = self._ready().get("lastHeartbeatTime")
        self.start_kubelet()

    def node(self) -> Json:
        """The node object."""
        return self.api.request("GET", f"/api/v1/nodes/{NODE}")

    def wait_ready(self) -> None:
        """Waits until the present kubelet has reported that the node is Ready."""

        def ready() -> bool:
            self.processes.check("kubelet")
            condition = self._ready()
            return condition.get("status") == "True" and condition["lastHeartbeatTime"] != self._heartbeat

        wait_until("node Ready", ready, 120, every=0.1)

    def _ready(self) -> Json:
        """The node's condition Ready; empty as long as there is none."""
        try:
            conditions = self.node()["status"]["conditions"]
        except (ApiError, KeyError):
            return {}
        return next((each for each in conditions if each["type"] == "Ready"), {})

    def allocatable(self) -> dict[str, int]:
        """What the node object offers of the two resources."""
        offered = self.node()["status"].get("allocatable", {})
        return {name: int(offered[name]) for name in (manifests.CORE, manifests.MEMORY) if name in offered}

    def wait_allocatable(self, cores: int, memory: int) -> None:
        """Waits until the node object offers exactly this."""
        wanted = {manifests.CORE: cores, manifests.MEMORY: memory}
        wait_until(f"allocatable {wanted}", lambda: self.allocatable() == wanted, 90, every=0.2)

    # -- pods

    def create(self, pods: Iterable[Json]) -> None:
        """Creates pods one after another over one connection (about 3 ms each)."""
        for pod in pods:
            self.api.request("POST", PODS, pod)

    def delete(self, names: Iterable[str], grace: int = 1) -> None:
        """Asks for the deletion of pods. With a grace of 0 they would vanish before the kubelet has let go."""
        for name in names:
            try:
                self.api.request("DELETE", f"{PODS}/{name}?gracePeriodSeconds={grace}")
            except ApiError as error:
                if error.status != 404:
                    raise

    def wait_gone(self, names: Sequence[str], timeout: float = 90) -> None:
        """Waits until none of these pods exists: by what the API server says itself, as the watch may not have brought them yet; and
        by the watch, so that no test takes one of them for a later pod of the same name."""
        wait_until("pods gone", lambda: not self._existing() & set(names), timeout, every=0.1)
        self.pods.wait("pods gone", lambda pods: not any(name in pods for name in names), timeout)

    def _existing(self) -> set[str]:
        return {str(item["metadata"]["name"]) for item in self.api.request("GET", PODS)["items"]}

    def delete_all(self, timeout: float = 120) -> None:
        """Deletes every pod and waits until they are gone."""
        names = sorted(self._existing())
        self.delete(names)
        self.wait_gone(names, timeout)

    # -- tools

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Runs kubectl as admin and answers what it printed."""
        command = [str(self.binaries / "kubernetes" / "kubectl"), f"--kubeconfig={self.kubeconfig('admin')}", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, input=stdin).stdout

    def apply(self, objects: Iterable[Json] | str, *flags: str) -> list[str]:
        """As `kubectl apply --server-side` does it, without a warning; a line for each object. `objects` may be YAML. Raises AssertionError
        with kubectl's words."""
        strict = ["--force-conflicts", "--validate=strict", "--warnings-as-errors"]
        try:
            text = self.kubectl("apply", "--server-side", *strict, "--filename=-", *flags, stdin=manifests.as_yaml(objects))
        except subprocess.CalledProcessError as error:
            raise AssertionError(f"kubectl: {error.stdout}{error.stderr}") from error
        return text.splitlines()

    @contextmanager
    def applied(self, objects: Sequence[Json] | str, *flags: str) -> Iterator[list[str]]:
        """The objects are there while the block lasts; `flags` are for their deletion. What `apply` returns."""
        try:
            yield self.apply(objects)
        finally:
            self.take_away(objects, *flags)

    def take_away(self, objects: Iterable[Json] | str, *flags: str) -> None:
        """As `kubectl delete` does it; what is gone is no error."""
        self.kubectl("delete", "--ignore-not-found", "--filename=-", *flags, stdin=manifests.as_yaml(objects))

    def ctr(self, *arguments: str) -> str:
        """Runs containerd's own client in the kubelet's namespace."""
        command = [str(self._software.runtime / "ctr"), "--address", str(CONTAINERD_SOCKET), "--namespace", "k8s.io", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def log_of(self, pod: str, container: str = "main") -> str:
        """What a container wrote so far."""
        meta = self.pods.all()[pod]["metadata"]
        folder = STATE / "pod-logs" / f"{meta['namespace']}_{pod}_{meta['uid']}" / container
        return "\n".join(written(sorted(folder.glob("*.log"))))

    def keep_logs(self, folder: Path) -> None:
        """Copies the logs of all parts to `folder`, for a look after a failure."""
        shutil.copytree(self.processes.logs, folder, dirs_exist_ok=True)
