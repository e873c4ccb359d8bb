"""Mistakes that people make with an installation: what they see of them, and that pods fare no worse for it than they must."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pytest
import yaml

from tools.chart import NAMESPACE

from . import daemonset, nvidia_plugin
from .agent import SIM, Agent
from .cluster import Cluster
from .daemonset import NAME, STATE, Installed
from .manifests import SHOW, Json, container, gpu_pod, pod
from .node import Node, cleared
from .places import DEVICE_PLUGINS, NODE, PROJECT
from .processes import wait_until

ROLE: Final = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{NAME}"


@contextmanager
def installed_with(
    agent: Installed, settings: Mapping[str, Mapping[str, Any]] | None = None, *, without_mount: str | None = None, **values: Any
) -> Iterator[None]:
    """With these settings and values of the chart, and less one of the host's folders. Begins when there is a new pod, which may have
    failed; ends as it was before."""
    agent.configure(settings or {})
    objects = agent.objects(**values)
    if without_mount is not None:
        _take_mount_out(objects, without_mount)
    try:
        agent.apply(objects)
        wait_until("the next pod", lambda: agent.only() is not None, 120)
        yield
    finally:
        agent.configure({})
        agent.start()


def _take_mount_out(objects: Iterable[Json], name: str) -> None:
    for each in objects:
        if each["kind"] == "DaemonSet":
            spec = each["spec"]["template"]["spec"]
            spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != name]
            for container in spec["containers"]:
                container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != name]


def status(agent: Installed, *, init: bool = False) -> Json:
    """The state of the container in its newest pod: of the agent's, or the preflight's. Empty before the kubelet has reported it."""
    statuses = agent.newest()["status"].get("initContainerStatuses" if init else "containerStatuses", [])
    return statuses[0] if statuses else {}


def last_words(agent: Installed, *, init: bool = False) -> Json:
    """How the container ended: its exit code, and as message what `kubectl describe pod` shows. Waits until it has."""
    ended: list[Json] = []

    def has_ended() -> bool:
        found = status(agent, init=init)
        ended[:] = [each["terminated"] for each in (found.get("state", {}), found.get("lastState", {})) if "terminated" in each]
        return bool(ended)

    wait_until("the container's end", has_ended, 120)
    return ended[0]


def event(cluster: Cluster, agent: Installed, reason: str, wanted: str) -> str:
    """The message of its newest pod's event with this reason that has the wanted words. Waits for it: others may come before, of a
    probe that was earlier than the agent, or of a volume that the kubelet had not received yet."""
    about = f"involvedObject.uid={agent.newest()['metadata']['uid']},reason={reason}"
    messages: list[str] = []

    def told() -> bool:
        items = cluster.api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector={about}")["items"]
        messages[:] = [str(each["message"]) for each in items]
        return any(wanted in each for each in messages)

    try:
        wait_until(f"event {reason} with {wanted!r}", told, 120, every=0.2)
    except TimeoutError as error:
        raise AssertionError(f"{error}, but {messages}") from None
    return next(each for each in messages if wanted in each)


def doctor(agent: Installed) -> dict[str, tuple[str, str]]:
    """What `gpumgr doctor` says in the agent's container: check -> its state, and message and remedy in one."""
    command = ("gpumgr", "doctor", "--config", "/etc/gpumgr/gpumgr.yaml", "--sim", SIM, "--json")
    try:
        text = agent.run_inside(*command)
    except subprocess.CalledProcessError as error:  # it found an error, or could not be run
        text = error.stdout
    return {each["check"]: (each["state"], f"{each['message']}; {each['remedy']}") for each in json.loads(text)}


def lines(agent: Installed, event: str) -> list[dict[str, Any]]:
    """The lines of this kind in its newest pod's log, all lives of the container together."""
    return [line for line in agent.log() if line["event"] == event]


@contextmanager
def denied(cluster: Cluster, *rights: tuple[str, str]) -> Iterator[None]:
    """Without these of its rights (verb, resource), for a while."""
    rules = cluster.api.request("GET", ROLE)["rules"]
    left = [
        {**rule, "resources": [resource], "verbs": [verb]}
        for rule in rules
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if (verb, resource) not in rights
    ]
    _put_rules(cluster, left)
    try:
        yield
    finally:
        _put_rules(cluster, rules)


def _put_rules(cluster: Cluster, rules: list[Json]) -> None:
    patch = [{"op": "replace", "path": "/rules", "value": rules}]
    cluster.kubectl("patch", "clusterrole", NAME, "--type=json", f"--patch={json.dumps(patch)}")


#: Folders that are there and that no kubelet knows.
ELSEWHERE: Final = STATE / "elsewhere"
WRONG_KUBELET: Final = {
    "kubelet": {
        "device_plugin_dir": str(ELSEWHERE / "plugins"),
        "pod_resources_socket": str(ELSEWHERE / "pods" / "kubelet.sock"),
    }
}
PREFLIGHT: Final = {"enabled": True, "extraArgs": ["--sim", SIM]}
WRONG_PORT: Final = "http.port: 'high' is not allowed; allowed: a whole number from 0 to 65535"
HOST_AGENT: Final = "gpumgr-host"


@pytest.fixture(scope="module")
def agent(cluster: Cluster, running_agent: Agent) -> Iterator[Installed]:
    with daemonset.installed(cluster, running_agent) as agent:
        for each in ("plugins", "pods"):
            (ELSEWHERE / each).mkdir(parents=True, exist_ok=True)
        yield agent


@pytest.fixture
def node(cluster: Cluster, agent: Installed) -> Iterator[Node]:
    with cleared(cluster, agent) as node:
        yield node


# -- folders -----------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_the_kubelets(node: Node, agent: Installed, cluster: Cluster) -> None:
    """The agent waits there, not ready and not restarted, and says so everywhere; pods that have GPUs run on. The preflight keeps such an
    agent from starting, with the reason in its pod, and lets it start when that is mended."""
    node.run([gpu_pod("share", 20, 20)])
    with installed_with(agent, WRONG_KUBELET):
        sockets = f"{ELSEWHERE}/plugins/kubelet.sock"
        wait_until("both resources refused", lambda: len(lines(agent, "registration_failed")) == 2)
        for line in lines(agent, "registration_failed"):
            assert f"at {sockets}: the socket does not exist" in line["error"]
            assert "set kubelet.device_plugin_dir to the folder of its kubelet.sock" in line["remedy"]
        event(cluster, agent, "Unhealthy", "statuscode: 503")
        wait_until("a status", lambda: status(agent))
        assert (status(agent)["ready"], status(agent)["restartCount"]) == (False, 0)
        said = f"core is not registered with the kubelet: can't register tencent.com/vcuda-core at {sockets}"
        wait_until("readyz with the reason", lambda: said in unready(agent))
        found = doctor(agent)
        assert found["kubelet"][0] == found["pod-resources"][0] == "error"
        assert f"no process answers at {sockets} (No such file or directory); start the kubelet" in found["kubelet"][1]
        assert "set kubelet.device_plugin_dir to the folder of its kubelet.sock" in found["kubelet"][1]
        assert f"at {ELSEWHERE}/pods/kubelet.sock: the socket does not exist" in found["pod-resources"][1]
        wait_until("the node's trouble", lambda: sockets in trouble(cluster), every=0.3)
        assert trouble(cluster).startswith("NotRegistered: ")
        assert len(lines(agent, "registration_failed")) == 2
        agent.apply(agent.objects(preflight=PREFLIGHT))
        wait_until("the pod with a preflight", lambda: status(agent, init=True), 120)
        ended = last_words(agent, init=True)
        assert ended["exitCode"] == 1
        *_, plugins, pods = ended["message"].splitlines()
        assert plugins.startswith(f"error    kubelet        no process answers at {ELSEWHERE}/plugins/kubelet.sock ")
        assert pods.startswith("error    pod-resources  can't ask for the pod resources at ")
        described = cluster.kubectl("describe", "pod", agent.newest()["metadata"]["name"], f"--namespace={NAMESPACE}")
        assert plugins in described
        assert "set kubelet.device_plugin_dir to the folder of its kubelet.sock" in plugins
        assert "running" not in status(agent)["state"]
        agent.configure({})
        agent.start(preflight=PREFLIGHT)
        assert last_words(agent, init=True)["exitCode"] == 0
        listens = f"ok       kubelet        listens at {DEVICE_PLUGINS}/kubelet.sock"
        wait_until("the preflight's finding in the log", lambda: listens in agent.log_text())
    node.check()


@pytest.mark.usefixtures("node")
def test_a_folder_that_the_node_lacks(agent: Installed, cluster: Cluster) -> None:
    """The volume is named like the setting's section, and the message has the setting's path."""
    with installed_with(agent, {"cri": {"socket": "/run/nowhere/containerd.sock"}}):
        told = event(cluster, agent, "FailedMount", 'volume "cri"')
    failed = 'MountVolume.SetUp failed for volume "cri" : hostPath type check failed, /run/nowhere is not a directory, '
    assert told == f'{failed}unable to determine its type: path "/run/nowhere" does not exist'


@pytest.mark.usefixtures("node")
def test_the_ledgers_mount_was_taken_out(agent: Installed) -> None:
    """The agent ends, and its pod says why: without the host's folder the next life would know nothing of this one."""
    with installed_with(agent, without_mount="state"):
        ended = last_words(agent)
        assert ended["exitCode"] == 2
        assert (
            f"process.lock_path {STATE}/ledger/agent.lock can't be used: Read-only file system; name a file" in ended["message"]
        )
        assert "in a pod one that is mounted from the host" in ended["message"]


def test_the_containers_mount_was_taken_out(node: Node, agent: Installed) -> None:
    """No container starts without its folder; the refusal of a GPU request names the folder, and the doctor names the setting."""
    with installed_with(agent, without_mount="allocations"):
        agent.wait_offered()
        state, told = doctor(agent)["host-paths"]
        assert state == "error"
        assert told.startswith(f"not mounted from the host: {STATE}/vm (container.allocation_dir); ")
        assert told.endswith("add a hostPath volume for each of them, mounted at the same path")
        node.cluster.create([gpu_pod("share", 20, 20)])
        node.wait_phase("share", "Pending")
        told = node.event("share", "GpuRefused")
        assert told.startswith(f"container main: the container's folder {STATE}/vm/")
        assert "can't be made: Read-only file system" in told


def unready(agent: Installed) -> str:
    """What its readiness probe says."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{agent.port}/readyz", timeout=30)
    with refused.value as answer:
        return answer.read().decode()


def trouble(cluster: Cluster) -> str:
    """What `kubectl describe node` says of its GPUs."""
    conditions = cluster.node()["status"]["conditions"]
    return next((f"{each['reason']}: {each['message']}" for each in conditions if each["type"] == "GpuTrouble"), "")


# -- rights ------------------------------------------------------------------------------------------------------------------


def test_without_permissions_pods_are_placed_and_reported_later(node: Node, agent: Installed, cluster: Cluster) -> None:
    """Each right is named once, by the log and by the doctor. When the rights are restored, pods are reported again. A permission that is
    not configured is no error: rbac.drain is false in the chart's values."""
    with denied(cluster, ("list", "pods"), ("patch", "pods"), ("create", "events")):
        wait_until("the doctor's complaint", lambda: doctor(agent)["rbac"][0] == "error", every=1)
        agent.renew()
        agent.wait_offered()
        node.run([gpu_pod("share", 20, 20), gpu_pod("whole", 100)])
        wait_until("the refusal in the log", lambda: refused_lists(agent))
        assert len(refused_lists(agent)) == 1
        missing = "not allowed: list pods, patch pods, create events; add them to the agent's ClusterRole: "
        assert doctor(agent)["rbac"][1].startswith(missing)
        node.check()
    wait_until("annotations of both", lambda: annotations(node, "share") and annotations(node, "whole"), 90)
    node.event("share", "GpuPlaced", "20 cores")
    wait_until("all rights", lambda: doctor(agent)["rbac"][0] == "ok", every=1)
    assert "no drains with evictions: create pods/eviction is not granted (rbac.drain)" in doctor(agent)["rbac"][1]
    node.check()


def annotations(node: Node, name: str) -> Json:
    found: Json = node.cluster.pods.all()[name]["metadata"].get("annotations", {})
    return found


def refused_lists(agent: Installed) -> list[str]:
    """What the log says of lists that were not allowed; other retries, of a server that was slow, are none of this test's."""
    told = [str(line["error"]) for line in lines(agent, "api_server_retries")]
    return [error for error in told if 'cannot list resource "pods"' in error]


# -- values and settings -----------------------------------------------------------------------------------------------------


def test_a_configmap_with_a_value_of_another_type(node: Node, agent: Installed, cluster: Cluster) -> None:
    """An agent that runs keeps its settings and the node has an event; one that starts says in its pod which line is wrong."""
    (good,) = (each for each in agent.objects() if each["kind"] == "ConfigMap")
    settings = yaml.safe_load(good["data"]["gpumgr.yaml"])
    settings["http"]["port"] = "high"
    try:
        agent.apply([{**good, "data": {"gpumgr.yaml": yaml.safe_dump(settings)}}])
        name = agent.newest()["metadata"]["name"]
        # The kubelet looks after a pod's volumes once a minute, and when something about the pod changes.
        cluster.kubectl("annotate", "pod", name, f"--namespace={NAMESPACE}", "e2e/look=now")
        wait_until("the refusal", lambda: lines(agent, "config_rejected"), 150, every=0.2)
        (told,) = lines(agent, "config_rejected")
        assert told["reason"].endswith(WRONG_PORT)
        assert told["consequence"] == "the previous settings stay in effect"
        wait_until("the node's event", lambda: any(WRONG_PORT in each for each in rejections(cluster)), every=0.2)
        node.run([gpu_pod("share", 20, 20)])
        cluster.kubectl("delete", "pod", name, f"--namespace={NAMESPACE}")
        ended = last_words(agent)
        assert ended["exitCode"] == 2
        (line,) = ended["message"].splitlines()
        assert line.startswith("gpumgr: /etc/gpumgr/gpumgr.yaml:")
        assert line.endswith(WRONG_PORT)
    finally:
        agent.apply([good])
        agent.renew()
        agent.wait_offered()
    node.check()


def rejections(cluster: Cluster) -> list[str]:
    """Messages of the node's events about settings that are not taken."""
    about = f"involvedObject.name={NODE},reason=GpumgrConfigRejected"
    items = cluster.api.request("GET", f"/api/v1/namespaces/default/events?fieldSelector={about}")["items"]
    return [str(each["message"]) for each in items]


# -- others on the node ------------------------------------------------------------------------------------------------------


def host_agent(cluster: Cluster, *assignments: str) -> list[str]:
    """`gpumgr run` as the systemd unit has it, with the DaemonSet's settings: the same sockets, the same folders."""
    mine = (f"node.name={NODE}", f"kubernetes.kubeconfig={cluster.kubeconfig('gpumgr')}", *assignments)
    settings = [word for each in mine for word in ("--set", each)]
    simulated = ["--sim", SIM, "--sim-dir", str(STATE / "host-sim")]
    return [sys.executable, "-m", "gpumgr", "run", "--config", str(STATE / "gpumgr.yaml"), *settings, *simulated]


def test_an_agent_of_the_host_beside_the_daemonset_ends(node: Node, agent: Installed, cluster: Cluster) -> None:
    """By the lock that both have from the host; with another lock by that of the kubelet's folder. The first one notices nothing."""
    first = agent.pid()
    wait_until("the kubelet has seen that it is ready", lambda: status(agent).get("ready"), every=0.2)
    for assignments, why in (
        ((), f"another gpumgr agent (pid {first}) runs on this node: it holds {STATE}/ledger/agent.lock; stop it before"),
        ((f"process.lock_path={STATE}/own.lock",), f"another gpumgr agent serves {DEVICE_PLUGINS}; stop it before"),
    ):
        command = host_agent(cluster, *assignments)
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 3
        assert why in done.stderr
    node.run([gpu_pod("share", 20, 20)])
    assert agent.pid() == first
    wait_until("it is ready", lambda: status(agent).get("ready"), every=0.2)  # the kubelet's probe has a timeout of its own
    node.check()


def test_a_daemonset_beside_an_agent_of_the_host_waits_for_its_end(node: Node, agent: Installed, cluster: Cluster) -> None:
    """The kubelet starts it again and again; each time its pod says who is there. Then it takes the other's pods over."""
    agent.stop()
    host = cluster.processes.start(HOST_AGENT, host_agent(cluster), cwd=PROJECT)
    try:
        agent.wait_offered()
        agent.start(wait=False)
        ended = last_words(agent)
        assert ended["exitCode"] == 3
        assert f"another gpumgr agent (pid {host}) runs on this node: it holds {STATE}/ledger/agent.lock" in ended["message"]
        node.run([gpu_pod("share", 20, 20)])
    finally:
        cluster.processes.stop(HOST_AGENT)
    wait_until("the DaemonSet's agent", lambda: status(agent).get("ready"), 150, every=0.2)
    agent.wait_offered()
    node.run([gpu_pod("later", 20, 20)])
    node.check()


def test_nvidias_plugin_beside_the_agent(node: Node, agent: Installed, cluster: Cluster) -> None:
    """Both register and serve pods, with the same GPU if it comes to that: log and doctor say so, and what to do."""
    node.run([gpu_pod("ours", 20, 20, command=SHOW)])
    node.wait_log("ours", "shown")
    gpu = visible(node, "ours")
    cluster.processes.start("nvidia-plugin", [sys.executable, "-m", "tests.e2e.nvidia_plugin", gpu], cwd=PROJECT)
    try:
        wait_until("its registration", lambda: nvidia_plugin.RESOURCE in cluster.processes.tail("nvidia-plugin"))
        theirs = container(command=SHOW, resources={"limits": {nvidia_plugin.RESOURCE: "1"}})
        node.run([pod("theirs", [theirs]), gpu_pod("later", 20, 20)])
        node.wait_log("theirs", "shown")
        assert visible(node, "theirs") == gpu
        wait_until("the warning", lambda: lines(agent, "gpus_given_out_twice"), every=0.2)
        told = lines(agent, "gpus_given_out_twice")[0]  # again where the other was once slow to answer
        assert f"answers at {nvidia_plugin.SOCKET}: it allocates these GPUs as nvidia.com/gpu" in told["problem"]
        assert told["remedy"].startswith("keep it off this node (the nodeSelector of its DaemonSet; ")
        assert doctor(agent)["plugins"] == ("error", f"{told['problem']}; {told['remedy']}")
        node.check()
        node.delete(["theirs"])
    finally:
        cluster.processes.stop("nvidia-plugin")


def visible(node: Node, name: str) -> str:
    """The GPU that a pod with the command SHOW was given."""
    (found,) = (line for line in node.cluster.log_of(name).splitlines() if line.startswith("NVIDIA_VISIBLE_DEVICES="))
    return found.partition("=")[2]
