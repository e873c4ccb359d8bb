"""The same manifests with vcuda limits run in both modes, and their containers see the same limits of the backend hami-core."""

import re
from collections.abc import Mapping, Sequence

from .agent import Agent
from .cluster import Cluster
from .dra import in_mode_dra, vcuda_by_claims
from .manifests import SLEEP, Json, container, pod
from .node import Node, gpu_nodes
from .tenants import BLOCK, build_programs, library, limited, mounted

LOOK = "env | sort; find /dev -maxdepth 1 -name 'nvidia*' | sort; cut -d' ' -f2 /proc/mounts; /programs/region_client show; echo shown"
#: Container -> what it sees of its GPUs and limits.
Seen = Mapping[str, Json]


def looking(name: str, containers: Sequence[Json], init: Sequence[Json] = ()) -> Json:
    """A pod with the tenants' programs in each container."""
    made = [mounted(each)[0] for each in (*init, *containers)]
    _, fields = mounted(container())
    return pod(name, made[len(init) :], init=made[: len(init)], bound=False, **fields)


def app(name: str, cores: int, memory: int = 0) -> Json:
    return container(name, cores, memory, command=f"{LOOK}; {SLEEP}")


SUITE = (
    looking("share", [app("main", 30, 16)]),
    looking("whole", [app("main", 200)]),
    looking("pair", [app("one", 20, 8), app("two", 40, 20)]),
    looking("staged", [app("main", 30, 16)], [container("first", 30, 16, command=LOOK)]),
    looking("sidecar", [app("main", 30, 16)], [{**app("side", 10, 4), "restartPolicy": "Always"}]),
    looking("none", [app("main", 0)]),
)


def seen(node: Node, name: str, container: str) -> Json:
    """Ids of allocations and GPUs differ from run to run."""
    node.wait_log(name, "shown", container)
    lines = node.cluster.log_of(name, container).splitlines()
    environment = dict(line.split("=", 1) for line in lines if re.match(r"(CUDA|GPU|NVIDIA|LD|GPUMGR)_\w+=", line))
    return {
        "gpus": environment.pop("NVIDIA_VISIBLE_DEVICES", "").count("GPU-"),
        "environment": environment,
        "nodes": len(gpu_nodes(set(lines))),
        "control": sorted(line for line in lines if re.fullmatch(r"/dev/nvidia[a-z-]+", line)),
        "mounts": sorted(line for line in lines if line.startswith(("/usr/local/vgpu", "/etc/ld", "/etc/vcuda", "/tmp/vgpu"))),
        "region": [line for line in lines if "memory=" in line],
    }


def run_suite(node: Node) -> Seen:
    node.run(SUITE)
    found = {
        f"{each['metadata']['name']}/{one['name']}": seen(node, each["metadata"]["name"], one["name"])
        for each in SUITE
        for one in (*each["spec"].get("initContainers", ()), *each["spec"]["containers"])
    }
    node.cluster.delete_all()
    return found


def test_containers_see_the_same_in_both_modes(cluster: Cluster, running_agent: Agent) -> None:
    """And their limits are those of the manifests."""
    settings = {"enforcement": {"backend": "hami-core"}, "hami_core": library()}
    with limited(cluster, running_agent, settings) as node:
        by_plugin = run_suite(node)
    build_programs()
    with in_mode_dra(cluster, running_agent, settings) as node, vcuda_by_claims(cluster):
        by_claim = run_suite(node)
    assert by_claim == by_plugin
    assert by_claim["share/main"]["environment"]["CUDA_DEVICE_MEMORY_LIMIT_0"] == "4096m"
    assert f"memory={16 * BLOCK} cores=30 " in by_claim["share/main"]["region"][0]
    assert f"memory={20 * BLOCK} cores=40 " in by_claim["pair/two"]["region"][0]
    assert (by_claim["whole/main"]["gpus"], by_claim["whole/main"]["region"]) == (2, [])
    assert (by_claim["none/main"]["gpus"], by_claim["none/main"]["nodes"]) == (0, 0)
