"""The policies for pods with HAMi's resources on the real API server: what they add, what they refuse, and who may write annotations."""

import subprocess
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from .api import PODS, ApiError, refusal
from .cluster import Cluster
from .manifests import Json, binding, container, pod
from .places import PROJECT
from .processes import free_ports, wait_listening, wait_until
from .scheduling import SCHEDULER, rights, start_extender

POLICIES: Final = PROJECT / "config" / "hami" / "admission-policies.yaml"
ACCOUNT: Final = "kube-system/gpumgr-scheduler"
FORGED: Final = {"hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,1000,30:;"}
REFUSED: Final = "only the gpumgr scheduler, and the gpumgr agent on the pod's node, may write it"


@contextmanager
def policies(
    cluster: Cluster,
    kinds: Sequence[str] = ("Mutating", "Validating"),
    more: Sequence[Json] = (),
    values: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """The shipped policies of these kinds, and other objects, in force. `values`: of the variables that people change."""
    shipped = [each for each in yaml.safe_load_all(POLICIES.read_text()) if each["kind"].startswith(tuple(kinds))]
    for variable in shipped[0]["spec"].get("variables", ()):
        variable["expression"] = (values or {}).get(variable["name"], variable["expression"])
    try:
        with cluster.applied([*shipped, *more]):
            wait_until("HAMi's policies", lambda: all(in_force(cluster)), every=0.2)
            yield
    finally:
        # Otherwise the next policies would be taken for in force by what is left of these.
        wait_until("the end of HAMi's policies", lambda: not any(in_force(cluster)), every=0.2)


@contextmanager
def webhook(cluster: Cluster, folder: Path, *settings: str) -> Iterator[Json]:
    """`gpumgr scheduler` with its webhook, and the shipped configuration with the address of that process."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=webhook", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    port, verbs = free_ports(2)
    files = (f"webhook.tls_cert_file={certificate}", f"webhook.tls_key_file={key}")
    made: Json = yaml.safe_load((POLICIES.parent / "webhook.yaml").read_text())
    (hook,) = made["webhooks"]
    path = hook["clientConfig"]["service"]["path"]
    authority = b64encode(certificate.read_bytes()).decode()
    hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
    with rights(cluster) as credentials:
        try:
            start_extender(cluster, credentials, verbs, "node.profile=hami", f"webhook.port={port}", *files, *settings)
            wait_listening(port)
            yield made
        finally:
            cluster.processes.stop("gpumgr-scheduler")


def in_force(cluster: Cluster) -> list[bool]:
    """Which of the policies the API server applies: it begins and ends with one after another, after a while."""
    asked = refusal(cluster.api.request, "POST", f"{PODS}/none/binding?dryRun=All", binding("none", FORGED, node="none"))
    return [
        is_completed(cluster),
        "is more than a GPU has" in refusal(made, cluster, [{"gpu": 1, "gpumem": "16Gi"}]),
        REFUSED in refusal(made, cluster, [{}], FORGED),
        "only the gpumgr scheduler may bind a pod with it" in asked,
    ]


def is_completed(cluster: Cluster) -> bool:
    """Whether a pod gets the scheduler's name. A webhook refuses the pod until its process answers."""
    try:
        return bool(made(cluster, [{"gpu": 1}])["spec"]["schedulerName"] == SCHEDULER)
    except ApiError:
        return False


def written(limits: Sequence[Mapping[str, int | str]], annotations: Mapping[str, str] | None = None, **spec: Any) -> Json:
    """A pod as a user of HAMi writes it; `limits`: of each container, without `nvidia.com/`."""
    parts = [container(f"c{number}", 0, 0) for number in range(len(limits))]
    for part, wanted in zip(parts, limits, strict=True):
        part["resources"] = {"limits": {f"nvidia.com/{key}": str(amount) for key, amount in wanted.items()}}
    result = pod("hami", parts, bound=False)
    result["metadata"]["annotations"] = dict(annotations or {})
    result["metadata"]["labels"] = spec.pop("labels", {})
    result["spec"] |= spec
    return result


def made(cluster: Cluster, *arguments: Any, **spec: Any) -> Json:
    """What the API server would store."""
    return cluster.api.request("POST", f"{PODS}?dryRun=All", written(*arguments, **spec))


@pytest.fixture(scope="module", params=["policy", "webhook"])
def ruled(cluster: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Pods are completed by the policy, or by the webhook where the cluster has no such policies; everything else is the same."""
    if request.param == "policy":
        with policies(cluster):
            yield cluster
    else:
        with webhook(cluster, tmp_path_factory.mktemp("webhook")) as made, policies(cluster, ["Validating"], [made]):
            yield cluster


def variables(part: Json) -> dict[str, str]:
    return {each["name"]: each["value"] for each in part.get("env", ())}


def test_a_priority_is_a_variable_unless_the_container_has_it(ruled: Cluster) -> None:
    own = {**container("own", 0, 0), "resources": {"limits": {"nvidia.com/gpu": "1", "nvidia.com/priority": "1"}}}
    own["env"] = [{"name": "CUDA_TASK_PRIORITY", "value": "7"}]
    found = made(ruled, [{"gpu": 1, "priority": 0}, {}], initContainers=[own])["spec"]
    parts = [*found["initContainers"], *found["containers"]]
    assert [variables(each).get("CUDA_TASK_PRIORITY") for each in parts] == ["7", "0", None]
    assert not any({"GPU_CORE_UTILIZATION_POLICY", "NVIDIA_VISIBLE_DEVICES"} & variables(each).keys() for each in parts)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        pytest.param([{"gpu": 1}], [{"gpu": 1, "gpucores": 100}], id="whole: neither cores nor memory"),
        pytest.param([{"gpu": 1, "gpumem": 8192}], [{"gpu": 1, "gpumem": 8192}], id="a part of the memory is a share"),
        pytest.param([{"gpu": 1, "gpumem-percentage": 50}], [{"gpu": 1, "gpumem-percentage": 50}], id="a percentage is a share"),
        pytest.param(
            [{"gpu": 1, "gpumem-percentage": 100}],
            [{"gpu": 1, "gpumem-percentage": 100, "gpucores": 100}],
            id="all of the memory is a whole GPU",
        ),
        pytest.param([{"gpu": 2, "gpucores": 70}], [{"gpu": 2, "gpucores": 70}], id="cores stay"),
        pytest.param([{"gpumem": 4096}], [{"gpu": 1, "gpumem": 4096}], id="memory without a count"),
        pytest.param([{"gpucores": 30}], [{"gpu": 1, "gpucores": 30}], id="cores without a count"),
        pytest.param([{}, {"gpu": 1}], [{}, {"gpu": 1, "gpucores": 100}], id="a container without GPUs stays as it is"),
        pytest.param([{"gpu": 0, "gpumem": 4096}], [{"gpu": 0, "gpumem": 4096}], id="no GPU asked"),
    ],
)
def test_a_pod_gets_count_and_cores_as_from_hamis_webhook(
    ruled: Cluster, limits: list[dict[str, int]], expected: list[dict[str, int]]
) -> None:
    found = made(ruled, limits)["spec"]
    wanted = [{f"nvidia.com/{key}": str(amount) for key, amount in each.items()} for each in expected]
    assert [each["resources"].get("limits", {}) for each in found["containers"]] == wanted
    assert [each["resources"].get("requests", {}) for each in found["containers"]] == wanted
    asks = any(each.get("gpu") for each in expected)
    assert found["schedulerName"] == (SCHEDULER if asks else "default-scheduler")


def test_init_containers_too(ruled: Cluster) -> None:
    first = {**container("first", 0, 0), "resources": {"limits": {"nvidia.com/gpumem": "1024"}}}
    found = made(ruled, [{"gpu": 1, "gpumem": 500}], initContainers=[first])["spec"]
    assert found["initContainers"][0]["resources"]["limits"] == {"nvidia.com/gpumem": "1024", "nvidia.com/gpu": "1"}
    assert found["schedulerName"] == SCHEDULER


@pytest.mark.parametrize(
    ("spec", "scheduler"),
    [
        ({"schedulerName": "hami-scheduler"}, SCHEDULER),
        ({"schedulerName": SCHEDULER}, SCHEDULER),
        ({"schedulerName": "volcano"}, "volcano"),
        ({"labels": {"hami.io/webhook": "ignore"}}, "default-scheduler"),
    ],
)
def test_pods_of_another_scheduler_and_with_hamis_label_stay_as_they_are(ruled: Cluster, spec: Json, scheduler: str) -> None:
    found = made(ruled, [{"gpu": 1}], **spec)["spec"]
    assert found["schedulerName"] == scheduler
    assert ("nvidia.com/gpucores" in found["containers"][0]["resources"]["limits"]) == (scheduler == SCHEDULER)


@pytest.mark.parametrize(
    ("limits", "spec", "reason"),
    [
        ([{"gpu": 1, "gpumem": "16Gi"}], {}, "container c0: nvidia.com/gpumem 16Gi is more than a GPU has; the number is in MiB"),
        ([{}, {"gpu": 1, "gpumem-percentage": 101}], {}, "container c1: nvidia.com/gpumem-percentage 101 must be 0 to 100"),
        ([{"gpu": 1, "gpumem": 1}] * 65, {}, "pod with 65 containers that request GPUs, at most 64 are supported"),
        ([{"gpu": 1, "gpucores": 150, "gpumem": 1000}], {}, "container c0: nvidia.com/gpucores 150 must be 0 to 100"),
        ([{"gpu": 1}], {"nodeName": "a"}, "spec.nodeName: a pod with nvidia.com/gpu must be placed by the scheduler"),
        (
            [{"gpu": 1, "gpumem": "16Gi"}],
            {"labels": {"hami.io/webhook": "ignore"}, "schedulerName": SCHEDULER},
            "nvidia.com/gpumem 16Gi is more than a GPU has",
        ),
    ],
)
def test_a_pod_that_can_not_be_served_is_refused(ruled: Cluster, limits: list[Json], spec: Json, reason: str) -> None:
    assert reason in refusal(made, ruled, limits, **spec)


def test_a_privileged_container_beside_a_gpu_is_refused(ruled: Cluster) -> None:
    first = {**container("first", 0, 0), "securityContext": {"privileged": True}}
    text = refusal(made, ruled, [{"gpu": 1}], initContainers=[first])
    assert "securityContext.privileged: a privileged container reaches all GPUs of the node" in text
    assert refusal(made, ruled, [{}], initContainers=[first]) == ""


@pytest.mark.hami_bug("B2: annotations of any pod are trusted")
@pytest.mark.parametrize(
    "key", ["vgpu-node", "vgpu-time", "vgpu-devices-to-allocate", "vgpu-mig-allocations", "bind-phase", "bind-time"]
)
def test_a_tenant_can_not_write_what_hamis_scheduler_writes(ruled: Cluster, key: str) -> None:
    """For every pod, also of other schedulers, and with the label that the webhook ignores."""
    for spec in ({}, {"schedulerName": "volcano"}, {"labels": {"hami.io/webhook": "ignore"}}):
        assert REFUSED in refusal(made, ruled, [{"gpu": 1}], {f"hami.io/{key}": "x"}, **spec)
    assert refusal(made, ruled, [{"gpu": 1}], {"hami.io/gpu-scheduler-policy": "spread"}) == ""


def test_the_scheduler_may_write_them(ruled: Cluster) -> None:
    """Its account, which the webhook's process may have here."""
    name = ["serviceaccount", "gpumgr-scheduler", "--namespace=kube-system"]
    with ExitStack() as stack:
        if not ruled.kubectl("get", *name, "--ignore-not-found"):
            ruled.kubectl("create", *name)
            stack.callback(ruled.kubectl, "delete", *name)
        role = ["clusterrolebinding", "hami-admission"]
        subject = "--serviceaccount=kube-system:gpumgr-scheduler"
        ruled.kubectl("create", *role, "--clusterrole=cluster-admin", subject)
        stack.callback(ruled.kubectl, "delete", *role)
        api = stack.enter_context(closing(ruled.api_of(ACCOUNT)))
        found = api.request("POST", f"{PODS}?dryRun=All", written([{"gpu": 1}], FORGED))
        assert found["metadata"]["annotations"] == FORGED
