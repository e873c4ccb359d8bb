"""`gpumgr simulate` on a snapshot of the simulated API server."""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION
from tests.cluster_api import ClusterApiServer
from tests.component.cluster.scheduler import conftest as objects
from tests.component.cluster.scheduler.conftest import inventory

from .conftest import Ended, Gpumgr

Json = dict[str, Any]
OWNER = [{"kind": "ReplicaSet", "controller": True, "name": "secret-owner", "uid": "u", "apiVersion": "apps/v1"}]


def node(name: str, count: int, *, text: str | None = None, labels: Mapping[str, str] | None = None, **spec: Any) -> Json:
    made = objects.node(name, count, inventory(name, count) if text is None else text)
    made["metadata"]["labels"] = {"kubernetes.io/hostname": name, **(labels or {})}
    made["spec"] = spec
    made["status"]["capacity"] |= {"cpu": "8", "memory": "32Gi", "pods": "10"}
    made["status"]["allocatable"] = made["status"]["capacity"]
    made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return made


def pod(name: str, cores: int, on: str | None = None, gpu: int = 0, **spec: Any) -> Json:
    """10 blocks, which are 2560 MiB."""
    placement = {"version": 1, "node": on, "containers": {"c0": [[f"GPU-{on}-{gpu}", cores, 2560]]}}
    made = objects.pod(name, ("app", cores, 10), on=on, annotations={PLACEMENT_ANNOTATION: json.dumps(placement)} if on else {})
    made["metadata"]["ownerReferences"] = OWNER
    made["metadata"]["labels"] = {"app": name}
    made["spec"]["containers"][0]["env"] = [{"name": "TOKEN", "value": "hush-hush"}]
    made["spec"] |= spec
    return {"kind": "Pod", **made}


async def budgets(_request: web.Request) -> web.Response:
    """Protects the pods with a label."""
    spec = {"selector": {"matchExpressions": [{"key": "protected", "operator": "Exists"}]}}
    return web.json_response({"metadata": {}, "items": [{"metadata": {"namespace": "team", "name": "pdb"}, "spec": spec}]})


@pytest.fixture
async def api() -> AsyncIterator[ClusterApiServer]:
    """60 cores are free on each GPU of a, and 40 on that of b; c is for others."""
    api = ClusterApiServer("a")
    api.routes.append(web.get("/apis/policy/v1/poddisruptionbudgets", budgets))
    async with api:
        api.put_node(node("a", 2))
        api.put_node(node("b", 1, labels={"disk": "ssd"}))
        api.put_node(node("c", 4, taints=[{"key": "dedicated", "value": "x", "effect": "NoSchedule"}]))
        for name, on, gpu, cores in (("one", "a", 0, 40), ("two", "a", 1, 40), ("three", "b", 0, 60)):
            api.put_document(pod(name, cores, on, gpu))
        yield api


Given = Callable[[Json | str], Path]
Simulate = Callable[..., Awaitable[Ended]]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """Writes the file of a pod."""

    def write(made: Json | str) -> Path:
        file = tmp_path / "pod.yaml"
        file.write_text(made if isinstance(made, str) else yaml.safe_dump(made))
        return file

    return write


@pytest.fixture
def simulate(gpumgr_command: Gpumgr, api: ClusterApiServer, tmp_path: Path) -> Simulate:
    """Runs `gpumgr simulate ARGUMENTS` on the cluster."""
    options = ("--from-cluster", "--kubeconfig", api.kubeconfig(tmp_path / "kubeconfig"))
    return lambda *arguments: gpumgr_command("simulate", *arguments, *options)


async def test_fit_names_node_and_gpus_or_each_reason(simulate: Simulate, given: Given) -> None:
    file = given(pod("new", 50, nodeSelector={"kubernetes.io/hostname": "a"}))
    found = await simulate("fit", file)
    assert (found.code, found.out.splitlines()[0]) == (0, "Pod team/new fits on node a GPU 0."), found
    assert "Not checked: pod affinities" in found.out
    file = given(pod("new", 70))
    found = await simulate("fit", file)
    assert found.code == 1
    assert [line.split(maxsplit=1) for line in found.out.splitlines()[2:5]] == [
        ["a", "has no GPU with 70 free cores and 2.5 GiB (closest: GPU 0, 60 cores and 13.5 GiB)"],
        ["b", "has 40 of tencent.com/vcuda-core free; the pod requests 70"],
        ["c", "has the taint dedicated=x:NoSchedule"],
    ]
    document = json.loads((await simulate("fit", file, "--output", "json")).out)
    assert (document["fits"], document["node"], set(document["reasons"])) == (False, None, {"a", "b", "c"})


async def test_defrag_prints_the_fewest_moves(simulate: Simulate, api: ClusterApiServer, given: Given) -> None:
    file = given(pod("new", 70))
    found = await simulate("defrag", file)
    assert (found.code, found.out.splitlines()[:3]) == (
        0,
        ["Pod team/new fits on node a GPU 0 after 1 move.", "POD       FROM     TO", "team/one  a GPU 0  b GPU 0"],
    )
    for name, on, gpu, cores in (("one", "a", 0, 40), ("two", "a", 1, 40), ("three", "b", 0, 60)):
        bare = pod(name, cores, on, gpu)
        del bare["metadata"]["ownerReferences"]
        api.put_document(bare)
    found = await simulate("defrag", file)
    assert (found.code, found.out.splitlines()[:2]) == (
        1,
        ["Found no plan with at most 3 moves.", "Not moved: 3 pods, each has no controller."],
    )


async def test_a_snapshot_answers_as_the_cluster_and_has_no_secrets(
    simulate: Simulate, gpumgr_command: Gpumgr, tmp_path: Path, given: Given
) -> None:
    file = given(pod("new", 50))
    snapshot = tmp_path / "snapshot.json"
    saved = await simulate("--snapshot", snapshot)
    assert (saved.code, saved.out, saved.err) == (0, "", "")
    assert not re.search("hush|TOKEN|secret-owner", snapshot.read_text())
    found = await gpumgr_command("simulate", "fit", file, "--snapshot", snapshot)
    assert found.out.splitlines()[0] == "Pod team/new fits on node a GPU 0."


async def test_budgets_protect_pods(simulate: Simulate, api: ClusterApiServer, given: Given) -> None:
    protected = pod("one", 40, "a")
    protected["metadata"]["labels"]["protected"] = "yes"
    api.put_document(protected)
    file = given(pod("new", 70))
    found = await simulate("defrag", file, "--output", "json")
    document = json.loads(found.out)
    assert [move["pod"] for move in document["moves"]] == ["team/two"]
    assert document["not_moved"] == {"has a PodDisruptionBudget": 1}


@pytest.mark.parametrize("status", [403, 404])
async def test_a_cluster_without_readable_budgets_has_answers(
    status: int, simulate: Simulate, api: ClusterApiServer, given: Given
) -> None:
    """404: Kubernetes 1.20 has no policy/v1."""

    async def no_budgets(_request: web.Request) -> web.Response:
        return web.json_response({"message": "no"}, status=status)

    await api.stop()
    api.routes[:] = [web.get("/apis/policy/v1/poddisruptionbudgets", no_budgets)]
    await api.start()
    found = await simulate("fit", given(pod("new", 50)))
    assert (found.code, found.out.splitlines()[0]) == (0, "Pod team/new fits on node a GPU 0.")
    assert "PodDisruptionBudgets can't be listed: no pod counts as protected by one" in found.err


async def test_what_can_not_be_read_is_counted_and_named(simulate: Simulate, api: ClusterApiServer, given: Given) -> None:
    api.put_node(node("old", 1, text=json.dumps({"version": 9})))
    api.put_node(
        {"metadata": {"name": "broken", "uid": "uid-broken"}, "status": {"allocatable": {"cpu": "many"}, "capacity": {}}}
    )
    bad = pod("bad", 10, "a")
    bad["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "lots"
    api.put_document(bad)
    file = given(pod("new", 100, nodeSelector={"kubernetes.io/hostname": "old"}))
    found = await simulate("fit", file)
    assert found.out.startswith("Pod team/new fits on node old GPU 0.\n")
    lines = found.err.splitlines()
    assert lines[0] == "3 problems of the snapshot:"
    assert lines[1].startswith("node old: annotation gpumgr.io/inventory: not valid: Invalid enum value 9")
    assert lines[2].startswith("node broken is left out: quantity 'many' can't be read")
    assert lines[3].startswith("pod team/bad is left out, and what it uses counts as free: ")


def pod_file(spec: str) -> str:
    return f"kind: Pod\nmetadata: {{name: x}}\nspec: {spec}"


def limits(text: str, more: str = "") -> str:
    return pod_file(f"{{{more}containers: [{{name: c, resources: {{limits: {{{text}}}}}}}]}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not a pod: while parsing a flow node"),
        ("kind: Pod\n---\nkind: Pod", "has 2 YAML documents; give exactly one, a Pod"),
        ("", "has 0 YAML documents; give exactly one, a Pod"),
        ("[1]", "is not a pod: Expected `object`, got `array`; correct it"),
        ("kind: !!map [1]", "is not a pod: expected a mapping node"),
        ("kind: Pod", "is not a pod: Object missing required field `metadata`; correct it"),
        (pod_file("{}"), "is not a pod: Object missing required field `containers` - at `$.spec`; correct it"),
        (limits("cpu: x"), "is not a pod: cpu: quantity 'x' can't"),
        ("kind: Deployment\nspec: {}", "its kind is Deployment; give a Pod"),
        (pod_file("{nodeName: a, containers: [{name: c}]}"), "it has spec.nodeName, so no scheduler places it"),
        (limits(""), "it requests no GPU; set the limit tencent.com/vcuda-core"),
        (limits("tencent.com/vcuda-core: 150"), "container c: "),
        (
            limits("tencent.com/vcuda-core: 100", "tolerations: 5, "),
            "is not a pod: Expected `array | null`, got `int` - at `$.spec.tolerations`; correct it, see `kubectl explain pod`",
        ),
    ],
)
async def test_a_pod_that_can_not_be_used(simulate: Simulate, given: Given, text: str, message: str) -> None:
    file = given(text)
    found = await simulate("fit", file)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith((f"gpumgr: {file} {message}", f"gpumgr: {file}: {message}"))


FIT = ("fit", "FILE")
READ = (*FIT, "--snapshot", "SNAPSHOT")
HEAD = '{"kind": "gpumgr snapshot", "version": 1, "nodes": '


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (FIT, "give --from-cluster, or --snapshot FILE"),
        ((*FIT, "--from-cluster"), "there is no kubeconfig: give --kubeconfig FILE"),
        ((*READ, "--kubeconfig", "FILE"), "--kubeconfig needs --from-cluster"),
        (("--snapshot", "SNAPSHOT", *FIT, "--from-cluster"), "--snapshot is not passed on to `fit`; give options after `fit`"),
        (("--policy", "best-fit", *READ), "--policy is not passed on to `fit`; give options after `fit`"),
        (READ, "snapshot.json: it can't be read: No such file or directory; give"),
    ],
)
async def test_wrong_usage(
    arguments: tuple[str, ...], message: str, gpumgr_command: Gpumgr, tmp_path: Path, given: Given
) -> None:
    paths = {"FILE": given(pod("new", 50)), "SNAPSHOT": tmp_path / "snapshot.json"}
    (await gpumgr_command("simulate", *(paths.get(word, word) for word in arguments))).failed(2, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "is not a snapshot: Object missing required field `kind`; make it with `gpumgr simulate --from-cluster"),
        (HEAD.replace("1", "2") + "[]}", "is not a snapshot: Invalid enum value 2 - at `$.version`"),
        ("{", "is not a snapshot: Input data was truncated"),
        ("[]", "is not a snapshot: Expected `object`, got `array`"),
        (
            HEAD + '[5], "pods": [], "poddisruptionbudgets": []}',
            "the snapshot has no node that can be used; node without a name is left out: Expected `object`, got `int`;",
        ),
    ],
)
async def test_what_is_no_snapshot(content: str, message: str, gpumgr_command: Gpumgr, tmp_path: Path, given: Given) -> None:
    (tmp_path / "snapshot.json").write_text(content)
    found = await gpumgr_command("simulate", "fit", given(pod("new", 50)), "--snapshot", tmp_path / "snapshot.json")
    found.failed(2, message)


async def test_a_cluster_that_can_not_be_read(simulate: Simulate, api: ClusterApiServer, tmp_path: Path, given: Given) -> None:
    file = given(pod("new", 50))
    api.forbidden.add(("list", "pods"))
    (await simulate("fit", file)).failed(1, "gpumgr: HTTP 403")
    await api.stop()
    (await simulate("fit", file)).failed(1, f"the API server of {tmp_path / 'kubeconfig'} did not answer: ")
