"""Pods of nvidia.com/gpu on the real kubelet beside vcuda pods: one GPU, one ledger, HAMi's environment, restarts."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import pytest

from .agent import Agent
from .api import PODS, Api
from .cluster import Cluster
from .manifests import MEMORY, SLEEP, Json, binding
from .node import Node, inventory, name_of
from .places import AGENT_STATE, NODE, PROJECT
from .processes import gpumgr, wait_until
from .scheduling import SCHEDULER, Scheduled
from .tenants import library, limited, lines, tenant, wait_line
from .test_scheduler_hami import serving

NODE_PATH = f"/api/v1/nodes/{NODE}"
REPLICA = "nvidia.com/gpu"
#: Annotations of HAMi's scheduler, of the node and of pods.
REGISTER, SCORES = "hami.io/node-nvidia-register", "hami.io/node-nvidia-score"
HANDSHAKE, LOCK = "hami.io/node-handshake", "hami.io/mutex.lock"
TO_ALLOCATE, ALLOCATED = "hami.io/vgpu-devices-to-allocate", "hami.io/vgpu-devices-allocated"
PHASE = "hami.io/bind-phase"
REGION = "/programs/region_client"


def settings() -> dict[str, dict[str, Any]]:
    return {"node": {"profile": "both"}, "enforcement": {"backend": "hami-core"}, "hami_core": library()}


@pytest.fixture(scope="module")
def both_node(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    with limited(cluster, running_agent, settings()) as node:
        yield node
    cluster.api.annotate(NODE_PATH, dict.fromkeys((REGISTER, SCORES, HANDSHAKE, LOCK)))


@pytest.fixture
def both(both_node: Node) -> Node:
    both_node.clear()
    wait_until("replicas offered", lambda: both_node.resources.allocatable(REPLICA).get(REPLICA) == 80)
    return both_node


def hami_pod(name: str, command: str = SLEEP, gpus: int = 1, **amounts: int) -> Json:
    """`amounts`: gpumem, gpumem_percentage, gpucores. The kubelet has no such resources and ignores them."""
    body = tenant(name, command)
    limits = {REPLICA: str(gpus), **{f"nvidia.com/{key.replace('_', '-')}": str(number) for key, number in amounts.items()}}
    body["spec"]["containers"][0]["resources"] = {"limits": limits}
    return body


def replicas(node: Node) -> dict[str, set[str]]:
    """Pod -> its ids, as the kubelet lists them."""
    return {held.place[1]: set(held.ids) for held in node.resources.held(REPLICA)}


def program(*arguments: str) -> Json:
    """What gpumgr's command prints."""
    done = gpumgr(*arguments, "--config", AGENT_STATE / "gpumgr.yaml", "--output", "json")
    assert done.returncode == 0, done.stderr
    printed: Json = json.loads(done.stdout)
    return printed


def migration(cluster: Cluster, *arguments: str) -> tuple[int, Json]:
    """Exit code and output of `gpumgr migrate hami`, which reads the agent's settings."""
    source = ("migrate", "hami", "--kubeconfig", cluster.kubeconfig("admin"), "--node", NODE)
    done = gpumgr(*source, "--to", AGENT_STATE / "gpumgr.yaml", "--output", "json", *arguments)
    assert done.stdout, done.stderr
    printed: Json = json.loads(done.stdout)
    return done.returncode, printed


def test_hami_pods_and_a_vcuda_pod_outlive_the_agent_and_its_ledger(both: Node) -> None:
    show = f"env | sort; cat /etc/ld.so.preload; {REGION} show; {SLEEP}"
    both.run([tenant("vcuda", SLEEP, cores=30, memory=16)])
    both.run([hami_pod("hami", show, gpumem=1001, gpucores=20)])
    (vcuda,), (hami,) = both.ledger_of("vcuda"), both.ledger_of("hami")
    assert hami.gpus == vcuda.gpus
    (device_id,) = replicas(both)["hami"]
    wait_line(both, "hami", "memory=")
    text = lines(both, "hami")
    uuid = next(line.partition("=")[2] for line in text if line.startswith("NVIDIA_VISIBLE_DEVICES="))
    assert device_id.rpartition("-")[0] == uuid
    assert {"CUDA_DEVICE_MEMORY_LIMIT_0=1001m", "CUDA_DEVICE_SM_LIMIT_0=20", "/usr/local/vgpu/libvgpu.so"} <= {*text}
    assert any(f"memory={1001 << 20} cores=20 " in line for line in text), text
    wait_until(
        "blocks that the HAMi pod holds are not offered",
        lambda: both.agent.offer[MEMORY] - both.agent.offered()[MEMORY] == 4,
    )

    before = both.agent.ledger()
    both.agent.kill()
    both.agent.start()
    wait_until("replicas offered", lambda: both.resources.allocatable(REPLICA).get(REPLICA) == 80)
    assert both.agent.ledger() == before
    both.run([hami_pod("later", gpumem=2000)])
    assert both.ledger_of("later")[0].gpus == hami.gpus
    assert len(replicas(both)["later"] | replicas(both)["hami"]) == 2
    rows = {row["pod"]: row for row in program("usage")["containers"]}
    assert (rows["hami"]["cores"], rows["hami"]["memory_bytes"]) == (20, 1001 << 20)
    granted = "gpumgr_container_memory_limit_bytes"

    def limits() -> dict[str, float]:
        """Pod -> bytes. A container has a series from the first sample of the GPUs after its grant on."""
        return {dict(labels)["pod"]: value for (name, labels), value in both.agent.metrics().items() if name == granted}

    wait_until("metrics of both", lambda: {"hami", "later"} <= limits().keys())
    assert (limits()["hami"], limits()["later"]) == (1001 << 20, 2000 << 20)
    both.delete(["hami", "later"])
    both.wait_freed("hami")
    both.check()
    both.run([hami_pod("pair", gpus=2, gpumem=3000, gpucores=10), hami_pod("whole")])
    left = {each.place: each.gpus for each in both.agent.ledger()}
    both.agent.kill()
    for file in (AGENT_STATE / "checkpoint").iterdir():
        if file.is_file():
            file.unlink()
    both.agent.start()
    wait_until("the same ledger", lambda: {each.place: each.gpus for each in both.agent.ledger()} == left)
    wait_until("the replicas beside a whole GPU's", lambda: both.resources.allocatable(REPLICA).get(REPLICA) == 80 - 9)


def test_running_pods_of_hamis_plugin_are_taken_over(both: Node) -> None:
    """Its scheduler chose the GPUs, and the kubelet took ids of any: both are kept from others, by gpumgr's scheduler, too."""
    uuids = [gpu["uuid"] for gpu in program("checkpoint", "show")["gpus"]]

    def registered_free() -> bool:
        """Whether all GPUs are registered with all their memory: the pods of the test before have ended only just now."""
        sizes = [gpu.get("devmem", 0) for gpu in registered(both).values()]
        return len(sizes) == 8 and len({*sizes}) == 1

    wait_until("what HAMi registers", registered_free)
    gpus = sorted(registered(both).values(), key=lambda gpu: uuids.index(gpu["id"]))
    both.agent.stop()
    wait_until("the kubelet has seen its end", lambda: not both.resources.allocatable(REPLICA).get(REPLICA))
    register(both.cluster.api, gpus)
    ids = [f"{uuid}-{number}" for uuid in uuids for number in range(10)]
    both.cluster.processes.start("hami-plugin", [sys.executable, "-m", "tests.e2e.nvidia_plugin", *ids], cwd=PROJECT)
    five, six = uuids[5], uuids[6]
    # Pod -> container -> GPU, MiB, cores.
    chosen = {
        "init": {"first": (five, 500, 10), "main": (five, 701, 20)},
        "many": {"left": (five, 300, 0), "right": (six, 400, 5)},
        "one": {"main": (six, 1001, 20)},
    }
    try:
        wait_until("HAMi's replicas", lambda: both.resources.allocatable(REPLICA).get(REPLICA) == 80)
        both.run([made_by_hami(name, containers) for name, containers in chosen.items()])
        held = {each.place: frozenset(each.ids) for each in both.resources.held(REPLICA)}
        assert len(held) == 4, "the kubelet lists no init containers"
        code, plan = migration(both.cluster)
        assert (code, plan["warnings"], plan["settings"]["node"]["profile"]) == (0, [], "both")
        assert plan["pods"] == [
            f"default/{name} ({container}): keeps {uuid} ({memory} MiB, {cores or 'no limit of'} cores)"
            for name, containers in chosen.items()
            for container, (uuid, memory, cores) in containers.items()
        ]
        containers = [f"default/{name} ({container})" for name, each in chosen.items() for container in each]
        code, before = migration(both.cluster, "--verify")
        assert (code, [each.partition(" is ")[0] for each in before["differences"]]) == (1, containers)
    finally:
        both.cluster.processes.stop("hami-plugin")
    both.agent.start()
    wait_until("replicas offered", lambda: both.resources.allocatable(REPLICA).get(REPLICA) == 80)
    for name, each in chosen.items():
        adopted = {holding.place[2]: holding.gpus[0] for holding in both.ledger_of(name)}
        assert adopted == {container: name_of(uuid) for container, (uuid, *_) in each.items()}
    assert {both.cluster.pods.all()[name]["status"]["phase"] for name in chosen} == {"Running"}
    assert migration(both.cluster, "--verify") == (0, {"adopted": containers, "differences": []})

    # The kubelet's ids lie on GPUs of their own, which are given to no other pod as a whole.
    free = {*uuids} - {five, six} - {each.rpartition("-")[0] for holding in held.values() for each in holding}
    others = [hami_pod(f"whole-{number}") for number in range(min(2, len(free)))]
    both.run(others)
    taken = {each.gpus[0] for number in range(len(others)) for each in both.ledger_of(f"whole-{number}")}
    assert taken <= {name_of(uuid) for uuid in free}

    uids = {both.cluster.pods.all()[name]["metadata"]["uid"] for name in chosen}
    wait_until("the adopted pods in the inventory", lambda: uids <= inventory(both).get("other", {}).keys())
    with serving(both.cluster):
        beside = scheduled("beside", five, gpumem=1000, gpucores=70)
        both.run([beside])
        ((named,),) = Scheduled(both.cluster).placed("beside")[1]
        assert named == five
        assert [holding.gpus for holding in both.ledger_of("beside")] == [(name_of(five),)]
        # 20 cores of the adopted pod, and the 70 above.
        both.cluster.create([scheduled("late", five, gpumem=1000, gpucores=20)])
        both.event("late", "FailedScheduling", f"of UUID {five}")
    assert {each.place: frozenset(each.ids) for each in both.resources.held(REPLICA) if each.place in held} == held


def made_by_hami(name: str, containers: Mapping[str, tuple[str, int, int]]) -> Json:
    """A pod with these containers ("first" is an init container), and one without GPUs before the others."""
    body = hami_pod(name)
    parts = {
        part: {**body["spec"]["containers"][0], "name": part, "resources": {"limits": hami_limits(memory, cores)}}
        for part, (_, memory, cores) in containers.items()
    }
    first = [{**part, "command": ["/bin/true"]} for key, part in parts.items() if key == "first"]
    plain = {**body["spec"]["containers"][0], "name": "plain", "resources": {}}
    body["spec"]["containers"] = [plain, *(part for key, part in parts.items() if key != "first")]
    if first:
        body["spec"]["initContainers"] = first
    entries = [[each] for each in containers.values()]
    entries.insert(len(first), [])
    return running_pod(body, NODE, *entries)


def running_pod(pod: Json, node: str, *containers: Sequence[tuple[str, int, int]]) -> Json:
    """The pod as HAMi 2.10's scheduler and device plugin have left it once it runs. `containers`: the (UUID, MiB, cores) of each, those of
    init containers first; empty for one without GPUs.

    The plugin decodes the list, empties the entry of each container, and encodes the list, in which the end counts as one more entry
    (patchErasedAnnotation in pkg/device-plugin/nvidiadevice/nvinternal/plugin/util.go)."""
    now = str(int(time.time()))
    written = {
        "hami.io/vgpu-node": node,
        "hami.io/vgpu-time": now,
        TO_ALLOCATE: ";" * (len(containers) + sum(bool(each) for each in containers)),
        ALLOCATED: "".join(
            "".join(f"{uuid},NVIDIA,{memory},{cores}:" for uuid, memory, cores in each) + ";" for each in containers
        ),
        "hami.io/bind-time": now,
        PHASE: "success",
    }
    return {**pod, "metadata": {**pod["metadata"], "annotations": written, "labels": {"hami.io/vgpu-node": node}}}


def register(api: Api, gpus: Sequence[Json]) -> None:
    """What HAMi's plugin and scheduler write at a node without pods; `gpus`: id, devmem and type of each. The plugin's order is that of a
    map, so that it changes (HAMi 2.10, pkg/device-plugin/nvidiadevice/nvinternal/plugin/register.go)."""
    rows = [
        {"id": gpu["id"], **({"index": place} if place else {}), "count": 10, "devmem": gpu["devmem"], "devcore": 100,
         "type": gpu["type"], "mode": "hami-core", "health": True}
        for place, gpu in enumerate(gpus)
    ]  # fmt: skip
    ids = [gpu["id"] for gpu in gpus]
    scores = [{"uuid": each, "score": {other: 20 for other in ids if other != each}} for each in ids]
    written = {
        REGISTER: json.dumps(rows[3:] + rows[:3], separators=(",", ":")),
        SCORES: json.dumps(scores, separators=(",", ":")),
        HANDSHAKE: f"Requesting_{datetime.now():%Y-%m-%d %H:%M:%S}",
    }
    api.annotate(NODE_PATH, written)


def hami_limits(memory: int, cores: int) -> dict[str, str]:
    return {REPLICA: "1", "nvidia.com/gpumem": str(memory), **({"nvidia.com/gpucores": str(cores)} if cores else {})}


def scheduled(name: str, uuid: str, **amounts: int) -> Json:
    """A pod for gpumgr's scheduler that demands this GPU of the node."""
    body = hami_pod(name, SLEEP, 1, **amounts)
    del body["spec"]["nodeName"]
    body["spec"] |= {"schedulerName": SCHEDULER, "nodeSelector": {"kubernetes.io/hostname": NODE}}
    body["metadata"]["annotations"] = {"nvidia.com/use-gpuuuid": uuid}
    return body


def registered(node: Node) -> dict[str, Json]:
    """GPU -> what HAMi's scheduler knows of it."""
    text = node.cluster.node()["metadata"]["annotations"].get(REGISTER, "[]")
    return {name_of(gpu["id"]): gpu for gpu in json.loads(text)}


def test_a_pod_of_hamis_scheduler_runs_with_what_it_chose_and_the_lock_of_the_node_goes(both: Node) -> None:
    """The pod is bound as that scheduler does it: annotated, the node locked. Best fit would choose another GPU."""
    api, uuid = both.cluster.api, inventory(both)["gpus"][5]["uuid"]
    body = running_pod(hami_pod("bound", gpumem=1001, gpucores=11), NODE, [(uuid, 1001, 11)])
    del body["spec"]["nodeName"]
    body["spec"]["schedulerName"] = "none"
    body["metadata"]["annotations"] |= {PHASE: "allocating", TO_ALLOCATE: body["metadata"]["annotations"][ALLOCATED]}
    both.cluster.create([body])
    api.annotate(NODE_PATH, {LOCK: "2026-01-01T00:00:00Z,default,bound"})
    api.request("POST", f"{PODS}/bound/binding", binding("bound", {}, node=NODE))
    both.wait_running(["bound"])
    assert [holding.gpus for holding in both.ledger_of("bound")] == [(name_of(uuid),)]
    wait_until("no lock", lambda: LOCK not in both.cluster.node()["metadata"]["annotations"])
    wait_until("success", lambda: both.cluster.pods.all()["bound"]["metadata"]["annotations"][PHASE] == "success")
