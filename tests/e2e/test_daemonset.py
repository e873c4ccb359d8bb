"""The agent as a DaemonSet, from its image: what it takes, what it may do, and that updates, downgrades and boots lose no pod."""

import contextlib
import json
import subprocess
import time
import uuid
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from gpumgr.sim.control import SimProcess

from . import daemonset, image_agent, tenants, traces
from .agent import SIM, Agent
from .cluster import Cluster
from .daemonset import ACCOUNT, NAME, NAMESPACE, RUN, Installed
from .gaps import gap
from .manifests import SHOW, SLEEP, Json, container, gpu_pod
from .node import Node, cleared
from .places import AUDIT_LOG, BOOT_ID, DEVICE_PLUGINS, STATE
from .processes import wait_until, whole_lines
from .test_updates import Update, denials, outside_of, published

GPU = 6
CAP_SYS_PTRACE = 19
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
Right = tuple[str, str, str]


@pytest.fixture(scope="module")
def agent(cluster: Cluster, running_agent: Agent) -> Iterator[Installed]:
    with daemonset.installed(cluster, running_agent) as agent:
        yield agent


@pytest.fixture
def node(cluster: Cluster, agent: Installed) -> Iterator[Node]:
    for each in cluster.api.request("GET", DEPLOYMENTS)["items"]:
        cluster.api.request("DELETE", f"{DEPLOYMENTS}/{each['metadata']['name']}?propagationPolicy=Foreground")
    wait_until("no deployment", lambda: not cluster.api.request("GET", DEPLOYMENTS)["items"], 120)
    with cleared(cluster, agent) as node:
        yield node


def deployment(name: str, replicas: int, cores: int, memory: int) -> Json:
    """Pods that a controller replaces, left to the scheduler."""
    spec = {
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "containers": [container(cores=cores, memory=memory)],
    }
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template},
    }


def deploy(node: Node, wanted: Json) -> None:
    node.cluster.api.request("POST", DEPLOYMENTS, wanted)


def scale(node: Node, name: str, replicas: int) -> None:
    node.cluster.kubectl("scale", "deployment", name, f"--replicas={replicas}")


def of(node: Node, name: str, phase: str = "Running") -> list[Json]:
    """A deployment's pods in this phase that are to stay."""
    pods = node.cluster.pods.all().values()
    mine = [each for each in pods if each["metadata"].get("labels", {}).get("app") == name]
    return [each for each in mine if each["status"].get("phase") == phase and "deletionTimestamp" not in each["metadata"]]


def wait_replicas(node: Node, name: str, replicas: int) -> None:
    wait_until(f"{replicas} replicas of {name}", lambda: len(of(node, name)) == replicas, 150, every=0.1)


def lives(node: Node, names: Iterable[str]) -> dict[str, tuple[str, str, int]]:
    """Pod -> its container, when that started, how often it was started anew: the same until it is restarted."""
    pods = node.cluster.pods.all()
    statuses = {name: pods[name]["status"]["containerStatuses"][0] for name in names}
    return {
        name: (str(each["containerID"]), str(each["state"]["running"]["startedAt"]), int(each["restartCount"]))
        for name, each in statuses.items()
    }


def residents(node: Node) -> list[str]:
    """Pods of many kinds that run; their names."""
    node.offer_all()
    node.run([gpu_pod("share", 20, 20), gpu_pod("whole", 100), gpu_pod("pair", 200)])
    deploy(node, deployment("resident", 4, 20, 16))
    wait_replicas(node, "resident", 4)
    node.check()
    return ["share", "whole", "pair", *(each["metadata"]["name"] for each in of(node, "resident"))]


def test_the_image(agent: Installed) -> None:
    """It holds the agent alone, and the client of vcuda, which containers run without any library beside it. Docker and podman run its
    health check, which uses the settings: they have a port other than the default."""
    alien = "find / -xdev -name pip -o -xdev -name cc1 -o -xdev -name conftest.py"
    found = agent.run_inside("/bin/sh", "-c", f"ls /opt/gpumgr/bin; {alien}")
    assert found.split() == ["gpumgr", "python", "python3", "python3.11"]
    build = "import pathlib, gpumgr.compat.gpu_manager.vcuda.files as c; print(c.build_client(pathlib.Path('/nowhere')))"
    client = agent.run_inside("/opt/gpumgr/bin/python3", "-c", build).strip()
    assert "--addr, --pod-uid and one of" in agent.run_inside("/bin/sh", "-c", f"{client} 2>&1 || true")
    agent.run_inside(*image_agent.healthcheck_command())


def test_pods_get_gpus_and_keep_them_in_the_next_pod_of_the_agent(node: Node, agent: Installed) -> None:
    node.offer_all()
    node.run([gpu_pod("share", 30, 16, command=SHOW), gpu_pod("whole", 100), gpu_pod("pair", 200)])
    node.wait_log("share", "shown")
    assert "NVIDIA_VISIBLE_DEVICES=GPU-" in node.cluster.log_of("share")
    with gap(agent.offers) as seen:
        agent.renew()
        agent.wait_offered()
        time.sleep(0.1)
    print({"container_start_to_registered_seconds": round(seen.longest[1] - agent.started(), 3)})
    deploy(node, deployment("scheduled", 3, 25, 20))
    wait_replicas(node, "scheduled", 3)
    node.check()


def test_a_rolling_update_disturbs_no_pod(node: Node, agent: Installed) -> None:
    """Running pods keep containers and GPUs; the kubelet may refuse one that comes between the two agents, and none before or after."""
    names = residents(node)
    before, ledger, old = lives(node, names), agent.ledger(), agent.newest()["metadata"]["uid"]
    deploy(node, deployment("arriving", 0, 10, 8))
    begun = time.monotonic()
    with published(node.cluster) as publishing, gap(agent.offers) as seen:
        agent.surge({})
        for replicas in range(1, 9):
            scale(node, "arriving", replicas)
            node.cluster.create([gpu_pod(f"bare-{replicas}", 5, 4)])
            time.sleep(0.4)
        agent.wait_rolled(old)
        agent.wait_offered()
        ended = time.monotonic()
    wait_replicas(node, "arriving", 8)
    assert lives(node, names) == before
    assert {each for each in agent.ledger() if each.place[1] in names} == set(ledger)
    node.check()
    bare = [each for name, each in node.cluster.pods.all().items() if name.startswith("bare-")]
    refused = [each for each in [*bare, *of(node, "arriving", "Failed")] if each["status"]["phase"] == "Failed"]
    assert {each["status"]["reason"] for each in refused} <= {"UnexpectedAdmissionError"}
    appeared = {each["metadata"]["name"]: created(each) for each in refused}
    denied = {name: found for name, found in denials(node.cluster, begun).items() if name in appeared}
    assert set(denied) == set(appeared)
    waits = [monotonic(line["timestamp"]) for line in agent.log() if line["event"] == "waiting_for_other_agent"]
    assert waits
    # On a busy machine the watch can be too slow to see a gap. The former agent ends after the next one has begun to wait for that.
    rolled = Update(begun, seen.spans or [(waits[0], ended)])
    outside = outside_of([rolled], publishing.spans, appeared, denied)
    assert not outside, (outside, rolled)
    print({"rolling_update_gap_seconds": round(seen.seconds, 3), "rolling_update_refused_pods": len(refused)})


def created(pod: Json) -> float:
    """When a pod was created (monotonic clock); the API server writes whole seconds."""
    return monotonic(pod["metadata"]["creationTimestamp"])


def monotonic(stamp: str) -> float:
    """An ISO 8601 time on the monotonic clock, in seconds."""
    return datetime.fromisoformat(stamp).timestamp() - (time.time() - time.monotonic())


@contextlib.contextmanager
def booted_anew(cluster: Cluster, agent: Installed) -> Iterator[str]:
    """The power goes and comes back: every process of the node is gone, and all that was in memory. Inside the new boot's id."""
    processes = cluster.processes
    processes.kill("kubelet")
    processes.kill("containerd")
    traces.lose_power()
    agent.lose_memory()
    other = STATE / "boot_id"
    other.write_text(f"{uuid.uuid4()}\n")
    subprocess.run(["mount", "--bind", other, BOOT_ID], check=True)
    try:
        cluster.start_containerd()
        cluster.wait_containerd()
        cluster.start_kubelet()
        yield other.read_text().strip()
    finally:
        subprocess.run(["umount", BOOT_ID], check=True)


def test_the_node_boots(node: Node, agent: Installed, cluster: Cluster) -> None:
    """All that ran is gone, the ledger is not; a pod that returns gets GPUs, and nothing is held for the others.

    The agent reads the boot's id for MPS alone, because a boot ends its daemons and compute modes (tests/unit/enforcement); for pods it
    uses the kubelet and the container runtime. The kubelet reads the id to distinguish a boot from its own restart.
    """
    before = {container for container, _, _ in lives(node, residents(node)).values()}
    old = cluster.node()["status"]["nodeInfo"]["bootID"]

    def returned() -> bool:
        """The API server has pods as running that ran before the boot, until the kubelet has reported their containers."""
        statuses = [status for each in of(node, "resident") for status in each["status"].get("containerStatuses", ())]
        return len(statuses) == 4 and all("running" in each["state"] and each["containerID"] not in before for each in statuses)

    with booted_anew(cluster, agent) as boot:
        cluster.wait_ready()
        wait_until("the node's new boot id", lambda: cluster.node()["status"]["nodeInfo"]["bootID"] == boot != old)
        agent.wait_offered(120)
        wait_until("four replicas with new containers", returned, 120, every=0.1)
        wait_until("the bare pods have ended", lambda: not {"share", "whole", "pair"} & running(node))
        node.check()
        node.run([gpu_pod("later", 100)])
        node.check()


def running(node: Node) -> set[str]:
    return {name for name, each in node.cluster.pods.all().items() if each["status"].get("phase") == "Running"}


def rights_used(since: int) -> tuple[set[Right], set[Right]]:
    """(group, resource, verb) that the agent's account was granted, and refused, after that many bytes of the audit log."""
    used: dict[bool, set[Right]] = {True: set(), False: set()}
    for line in whole_lines(AUDIT_LOG, since):
        entry: dict[str, Any] = json.loads(line)
        if entry["user"]["username"] == ACCOUNT:
            about = entry["objectRef"]
            resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
            refused = entry["responseStatus"]["code"] in (401, 403)
            used[not refused].add((about.get("apiGroup", ""), resource, entry["verb"]))
    return used[True], used[False]


def rights_granted(cluster: Cluster) -> set[Right]:
    """What the chart's role grants."""
    rules = cluster.api.request("GET", f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{NAME}")["rules"]
    return {
        (group, what, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for what in rule["resources"]
        for verb in rule["verbs"]
    }


def prove_rights(cluster: Cluster, since: int) -> None:
    """Every granted right was used, and no other was asked for."""
    wait_until("every granted right used", lambda: rights_granted(cluster) <= rights_used(since)[0], 120, every=0.5)
    used, refused = rights_used(since)
    assert used == rights_granted(cluster)
    assert not refused


def test_every_right_that_the_chart_grants_is_used(node: Node, agent: Installed, cluster: Cluster) -> None:
    since = AUDIT_LOG.stat().st_size
    agent.renew()
    agent.wait_offered()
    node.run([gpu_pod("share", 20, 20)])
    for _ in range(2):  # the second event of a kind is a patch of the first one
        before = node_events(cluster, "GpuLost"), node_events(cluster, "GpuBack")
        agent.control.lose_gpu(GPU)
        wait_until("the GPU's loss", partial(has_more_events, cluster, "GpuLost", before[0]))
        agent.control.restore_gpu(GPU)
        wait_until("the GPU's return", partial(has_more_events, cluster, "GpuBack", before[1]))
    prove_rights(cluster, since)


def node_events(cluster: Cluster, reason: str) -> int:
    """How many events of this kind the node has had."""
    items = cluster.api.request("GET", f"/api/v1/events?fieldSelector=involvedObject.kind=Node,reason={reason}")["items"]
    return sum(int(each.get("count") or 1) for each in items)


def has_more_events(cluster: Cluster, reason: str, before: int) -> bool:
    return node_events(cluster, reason) > before


def test_the_chart_grants_more_rights_only_if_configured(node: Node, agent: Installed, cluster: Cluster) -> None:
    """Pods over their limit are evicted and refused pods removed if configured; the chart grants the rights then, not before."""
    plain = rights_granted(cluster)
    changes: dict[str, dict[str, Any]] = {
        "kubernetes": {"delete_failed_pods": True},
        "enforcement": {"evict": True, "over_limit_samples": 2, "over_limit_slack_mebibytes": 0},
    }
    more = {("", "pods", "delete"), ("", "pods/eviction", "create")}
    agent.stop()  # an agent that ends after its rights is refused
    since = AUDIT_LOG.stat().st_size
    with agent.configured(changes):
        try:
            assert rights_granted(cluster) - plain == more
            node.run([gpu_pod("greedy", 30, 16)])
            process = SimProcess(pid=tenants.pids(node, "greedy")[-1], memory_bytes=20 * tenants.BLOCK)
            agent.control.set_processes(tenants.gpu_index(node, "greedy"), [process])
            cluster.wait_gone(["greedy"])
            deploy(node, deployment("odd", 1, 150, 0))
            wait_until("both used", lambda: more <= rights_used(since)[0], every=0.3)
            used, refused = rights_used(since)
            assert used <= rights_granted(cluster)
            assert not refused
        finally:
            cluster.kubectl("delete", "deployment", "odd", "--ignore-not-found", "--cascade=foreground")
            agent.control.clear()


def test_regions_of_the_daemonset_are_mounts_of_the_host(node: Node, agent: Installed) -> None:
    """The chart asks for Bidirectional propagation. The agent's pod mounts a tmpfs of limited size for each container; the container
    gets the file that is on it, keeps it while the agent is replaced, and the host's mount goes with the pod."""
    tenants.build_programs()
    with agent.configured({"enforcement": {"backend": "hami-core", "orphan_grace_seconds": 1}, "hami_core": tenants.library()}):
        node.run([tenants.tenant("bounded", "while sleep 1; do /programs/region_client show; done")])
        allocation = tenants.allocation(node, "bounded")
        folder = RUN / "hami-core" / allocation
        tenants.wait_line(node, "bounded", f"memory={16 * tenants.BLOCK} cores=30 ")
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {folder} " in line]
        assert len(mounts) == 1, mounts
        assert f"tmpfs gpumgr-{allocation} " in mounts[0]
        assert "size=2560k" in mounts[0]
        agent.renew()
        agent.wait_offered()
        assert folder.is_mount()
        seen = len(tenants.lines(node, "bounded"))
        wait_until("more lines", lambda: len(tenants.lines(node, "bounded")) > seen + 1)
        assert f"memory={16 * tenants.BLOCK} cores=30 " in tenants.lines(node, "bounded")[-1]
        assert not [line for line in agent.log() if line["event"] == "container_files_not_bounded"]
        node.delete(["bounded"])
        wait_until("no mount of the region", lambda: str(folder) not in Path("/proc/self/mountinfo").read_text())


def rights_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_one_capability_is_enough_to_place_pods_and_to_limit_them(node: Node, agent: Installed) -> None:
    """`privileged: false`. The files of a running container are kept when the agent is killed, those of an ended one are removed."""
    tenants.build_programs()
    agent.configure({"enforcement": {"backend": "hami-core", "orphan_grace_seconds": 1.0}, "hami_core": tenants.library()})
    try:
        agent.start(privileged=False)
        node.run([tenants.tenant("stays", f"/programs/region_client show; {SLEEP}"), tenants.tenant("goes", SLEEP)])
        rights = rights_of(agent.pid())
        assert {int(rights[key], 16) for key in ("CapPrm", "CapEff", "CapBnd")} == {1 << CAP_SYS_PTRACE}
        assert (rights["NoNewPrivs"], rights["Seccomp"]) == ("1", "2")
        tenants.wait_line(node, "stays", f"memory={16 * tenants.BLOCK} cores=30 ")
        kept, left = (RUN / "hami-core" / tenants.allocation(node, name) for name in ("stays", "goes"))
        assert kept.is_dir()
        node.delete(["goes"])
        agent.kill()  # the next agent finds one folder that a container has mounted, and one without a mount
        wait_until("the ended pod's files gone", lambda: not left.exists(), 120)
        assert kept.is_dir()
        node.check()
        node.delete(["stays"])
        agent.wait_empty()
    finally:
        agent.configure({})
        agent.start()


# -- a mistake of an installation --------------------------------------------------------------------------------------------


#: Folders that are there and that no kubelet knows.
ELSEWHERE: Final = daemonset.STATE / "elsewhere"
WRONG_KUBELET: Final = {
    "kubelet": {
        "device_plugin_dir": str(ELSEWHERE / "plugins"),
        "pod_resources_socket": str(ELSEWHERE / "pods" / "kubelet.sock"),
    }
}
PREFLIGHT: Final = {"enabled": True, "extraArgs": ["--sim", SIM]}


def last_words(agent: Installed) -> Json:
    """How the preflight of its newest pod ended: the exit code, and as message what `kubectl describe pod` shows. Waits until it has."""

    def ends() -> list[Json]:
        statuses = (agent.only() or {}).get("status", {}).get("initContainerStatuses", [])
        states = [each.get(name, {}) for each in statuses for name in ("state", "lastState")]
        return [each["terminated"] for each in states if "terminated" in each]

    return wait_until("the preflight's end", ends, 120)[0]


def test_a_preflight_keeps_an_agent_from_a_folder_that_is_not_the_kubelets(
    node: Node, agent: Installed, cluster: Cluster
) -> None:
    """Its pod has the reason, pods that have GPUs run on, and the agent starts when that is mended."""
    node.run([gpu_pod("share", 20, 20)])
    for each in ("plugins", "pods"):
        (ELSEWHERE / each).mkdir(parents=True, exist_ok=True)
    agent.configure(WRONG_KUBELET)
    try:
        agent.apply(agent.objects(preflight=PREFLIGHT))
        ended = last_words(agent)
        assert ended["exitCode"] == 1
        *_, plugins, pods = ended["message"].splitlines()
        assert plugins.startswith(f"error    kubelet        no process answers at {ELSEWHERE}/plugins/kubelet.sock ")
        assert pods.startswith("error    pod-resources  can't ask for the pod resources at ")
        described = cluster.kubectl("describe", "pod", agent.newest()["metadata"]["name"], f"--namespace={NAMESPACE}")
        assert plugins in described
        assert "set kubelet.device_plugin_dir to the folder of its kubelet.sock" in plugins
        assert "running" not in agent.newest()["status"]["containerStatuses"][0]["state"]
        agent.configure({})
        agent.start(preflight=PREFLIGHT)
        assert last_words(agent)["exitCode"] == 0
        listens = f"ok       kubelet        listens at {DEVICE_PLUGINS}/kubelet.sock"
        wait_until("the preflight's finding in the log", lambda: listens in agent.log_text())
    finally:
        agent.configure({})
        agent.start()
    node.check()
