"""Settings of the cluster's parts, and the pods of the tests, as plain data."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .places import CDI_SPECS, CONTAINERD_SOCKET, IMAGE, KUBELET_ROOT, NODE, POD_LOGS, PROJECT, STATE

Json = dict[str, Any]
RIGHTS = PROJECT / "config" / "examples" / "rbac.yaml"
CORE = "tencent.com/vcuda-core"
MEMORY = "tencent.com/vcuda-memory"

#: A process 1 that ends at once on SIGTERM (a bare `sleep` as process 1 would sit out the grace).
SLEEP = "trap 'exit 0' TERM; sleep 3600 & wait"
#: The same, after writing to the log what the container got.
SHOW = f"env; find /dev -maxdepth 1 -name 'nvidia*' | sort; cut -d' ' -f2 /proc/mounts; echo shown; {SLEEP}"

# The node is Ready only with a network; every pod here uses the host's, so this one carries nothing.
CNI: Json = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}

#: Who asked for what, of service accounts only: an agent in a pod is one.
AUDIT: Json = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}
#: The controllers that the tests need. None of them judges nodes or evicts pods.
CONTROLLERS = (
    "daemonset-controller",
    "deployment-controller",
    "replicaset-controller",
    "endpointslice-controller",
    "serviceaccount-controller",
    "root-ca-certificate-publisher-controller",
    "namespace-controller",
    "garbage-collector-controller",
    "resourceclaim-controller",
    "device-taint-eviction-controller",
)


def containerd_config(folder: Path) -> str:
    """containerd's settings, in the version that 1.6 and 2.x read; images and containers are kept in `folder`.

    `restrict_oom_score_adj`: without CAP_SYS_RESOURCE (a sandboxed machine) runc can't lower the score. 1.6 ignores `cdi_spec_dirs`.
    """
    return f"""
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{IMAGE}"
restrict_oom_score_adj = true
cdi_spec_dirs = ["{CDI_SPECS}"]
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{STATE}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "{STATE}/runc"
"""


def kubelet_config(port: int) -> Json:
    """The kubelet's settings: those of an ordinary node, less what a test machine lacks, with shorter waits: a container that ended
    starts again after 1 s (10 s to 5 min), and a change of the allocatable devices is published after 1 s (10 s)."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "port": port,
        "readOnlyPort": 0,
        "healthzPort": 0,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        "nodeStatusUpdateFrequency": "1s",
        "nodeStatusReportFrequency": "5m",
        "evictionHard": {},
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "enableControllerAttachDetach": False,
        "maxPods": 250,
        "podLogsDir": str(POD_LOGS),
        "volumePluginDir": f"{KUBELET_ROOT}/volume-plugins",
        "registerNode": True,
    }


def kubeconfig(server: str, authority: str, token: str) -> Json:
    """Access to the API server for one bearer of a token."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": {"server": server, "certificate-authority": authority}}],
        "users": [{"name": "e2e", "user": {"token": token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
        "current-context": "e2e",
    }


def agent_rights() -> list[tuple[str, Json]]:
    """What the agent may do, as shipped, with the paths that the objects are posted to; here it is the user "gpumgr".

    What is shipped as comments, for mode dra and for evictions, is taken in.
    """
    group = "rbac.authorization.k8s.io"
    base = f"/apis/{group}/v1"
    shipped = {each["kind"]: each for each in yaml.safe_load_all(_with_evictions(RIGHTS.read_text()))}
    binding = {**shipped["ClusterRoleBinding"], "subjects": [{"kind": "User", "apiGroup": group, "name": "gpumgr"}]}
    return [(f"{base}/clusterroles", shipped["ClusterRole"]), (f"{base}/clusterrolebindings", binding)]


def _with_evictions(text: str) -> str:
    fuller = re.sub(r"(?m)^  # (- apiGroups|  resources|  verbs)", r"  \1", text)
    assert fuller != text, f"{RIGHTS} has no comment for evictions any more"
    return fuller


def as_yaml(objects: Iterable[Json] | str) -> str:
    """What kubectl reads; YAML stays as it is."""
    return objects if isinstance(objects, str) else "".join(f"---\n{json.dumps(each)}\n" for each in objects)


def container(name: str = "main", cores: int = 0, memory: int = 0, command: str = SLEEP, **fields: Any) -> Json:
    """A container of a test pod; a resource of 0 is left out."""
    limits = {resource: str(number) for resource, number in ((CORE, cores), (MEMORY, memory)) if number}
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", command],
        "resources": {"limits": limits},
        **fields,
    }


def pod(name: str, containers: Sequence[Json], *, init: Sequence[Json] = (), bound: bool = True, **spec: Any) -> Json:
    """A test pod: bound to the node at once, or left to the scheduler."""
    base: Json = {
        "hostNetwork": True,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": list(containers),
    }
    if init:
        base["initContainers"] = list(init)
    if bound:
        base["nodeName"] = NODE
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": base | spec}


def binding(name: str, annotations: Mapping[str, str | None], *, node: str) -> Json:
    """What is posted to bind a pod of this name."""
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "annotations": annotations}, "target": target}


def gpu_pod(name: str, cores: int, memory: int = 0, *, bound: bool = True, command: str = SLEEP) -> Json:
    """The commonest test pod: one container with these resources."""
    return pod(name, [container(cores=cores, memory=memory, command=command)], bound=bound)
