"""`gpumgr resize`, `suspend` and `resume`: wrong input, pods to which they do not apply, and the containers that they wait for.

tests/agent/test_burst_and_resize.py and test_suspend.py have the commands with an agent.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from gpumgr.cli.remote_pod import RemotePod
from gpumgr.common.errors import GpumgrError
from gpumgr.kube.client import ApiServer
from tests.cluster_api import ClusterApiServer

from .conftest import Gpumgr

Json = dict[str, Any]
SHARE: Json = {"limits": {"tencent.com/vcuda-core": "30"}}
ENDED: Json = {"terminated": {"exitCode": 0}}
RUNS: Json = {"running": {}}
SETUP, MAIN, AWAY = {"container": "setup"}, {"container": "main"}, {"container": "main", "state": "suspended"}


def pod(
    name: str,
    rows: list[Json] | None,
    *,
    setup: Json = ENDED,
    main: Json = RUNS,
    phase: str = "Running",
    resources: Json = SHARE,
) -> Json:
    """`rows`: what the agent wrote about its containers. `setup`: the state of the init container, `main`: of the other one."""
    annotations = {} if rows is None else {"gpumgr.io/allocations": json.dumps(rows)}
    return {
        "metadata": {"namespace": "team", "name": name, "uid": f"uid-{name}", "annotations": annotations},
        "spec": {"containers": [{"name": "main", "resources": resources}], "initContainers": [{"name": "setup"}]},
        "status": {
            "phase": phase,
            "initContainerStatuses": [{"name": "setup", "state": setup}],
            "containerStatuses": [{"name": "main", "state": main}],
        },
    }


PODS = (
    pod("two", [MAIN, {"container": "side"}]),
    pod("claim", [MAIN], resources={"claims": [{"name": "gpu"}]}),
    pod("over", [MAIN], phase="Succeeded"),
    pod("lonely", [MAIN]),
    pod("away", [SETUP, AWAY]),
    pod("works", [SETUP, MAIN]),
    pod("sidecar", [SETUP, AWAY], setup=RUNS),
    pod("ended", [SETUP, MAIN], main=ENDED),
    pod("empty", []),
    pod("none", None),
)


@pytest.fixture
async def kubeconfig(folder: Path) -> AsyncIterator[Path]:
    async with ClusterApiServer("node") as api:
        for document in PODS:
            api.put_document(document)
        yield api.kubeconfig(folder / "kubeconfig")


NAMES_NONE = "has no share of a GPU from gpumgr; the pod's annotation gpumgr.io/allocations names none"
NO_SHARE = "container x has no share of a GPU from gpumgr; these containers have one: main, side"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("team/two", 2, "nothing to change: give --cores N, --memory MIB, or both"),
        ("team/two --cores 100", 2, "100 is not in the range 1<=x<=99"),
        ("team/two --memory 0", 2, "0 is not in the range x>=1"),
        ("a/b/c --cores 1", 2, "'a/b/c' is not a pod's name"),
        ("team/two --cores 1", 2, "several containers of the pod have GPUs: give --container with one of main, side"),
        ("team/two --cores 1 --container x", 1, NO_SHARE),
        ("team/claim --cores 1", 1, "the capacity of a claim is fixed by the API"),
        ("team/none --cores 1", 1, NAMES_NONE),
        ("team/over --cores 1", 1, "the pod has ended"),
        ("team/missing --cores 1", 1, "there is no pod team/missing; for another namespace give NAMESPACE/POD"),
    ],
)
async def test_what_can_not_be_resized_is_refused_with_the_reason(
    arguments: str, code: int, message: str, kubeconfig: Path, gpumgr_command: Gpumgr
) -> None:
    (await gpumgr_command("resize", *arguments.split(), "--kubeconfig", kubeconfig)).failed(code, message)


async def test_a_node_that_does_not_answer_is_said(
    kubeconfig: Path, gpumgr_command: Gpumgr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpumgr.cli.resize._ANSWER_SECONDS", 0.1)
    ended = await gpumgr_command("resize", "team/lonely", "--cores", "1", "--kubeconfig", kubeconfig)
    ended.failed(1, "the agent of the pod's node has not answered within 0.1 s; the request stays in the annotation")


DECIDED = {"main": {"cores": 30, "memoryMiB": 512, "requestedAt": "1"}}


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, {"cores": 30, "memoryMiB": 1024}),
        ({"cores": 40, "memoryMiB": 512, "requestedAt": "1"}, {"cores": 30, "memoryMiB": 1024}),
        ({"cores": 40, "memoryMiB": 512, "requestedAt": "2"}, {"cores": 40, "memoryMiB": 1024}),
    ],
)
async def test_what_is_not_given_stays_also_of_a_request_that_is_not_decided(
    asked: Json, wanted: Json, folder: Path, gpumgr_command: Gpumgr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpumgr.cli.resize._ANSWER_SECONDS", 0.0)
    document = pod("asked", [MAIN])
    requests = {"main": asked, "side": {"cores": 7}}
    annotations = {"gpumgr.io/resized": json.dumps(DECIDED), "gpumgr.io/resize": json.dumps(requests)}
    document["metadata"]["annotations"] |= annotations
    async with ClusterApiServer("node") as api:
        api.put_document(document)
        kubeconfig = api.kubeconfig(folder / "kubeconfig")
        await gpumgr_command("resize", "team/asked", "--memory", "1024", "--kubeconfig", kubeconfig)
        written = json.loads(api.annotations("uid-asked")["gpumgr.io/resize"])
    assert written["main"].pop("requestedAt") not in ("1", "2")
    assert written == {"main": wanted, "side": {"cores": 7}}


class Contested:
    """An API server at which another writer changes the pod before each of the first writes."""

    def __init__(self, losses: int) -> None:
        self.losses, self.version = losses, 0
        self.written: Json = {}

    async def find(self, _path: str) -> Json:
        self.version += 1
        return {"metadata": {"uid": "uid-a", "resourceVersion": str(self.version)}}

    async def send(self, _method: str, _path: str, body: Json, *, but: tuple[int, ...]) -> bool:
        assert but == (409,)
        self.losses -= 1
        self.written = body["metadata"]
        return self.losses < 0


async def annotate(server: Contested) -> Json:
    pod = RemotePod(cast("ApiServer", server), ("team", "a"))
    return await pod.annotate("key", lambda seen: f"text for {seen['metadata']['resourceVersion']}")


@pytest.mark.parametrize("losses", [0, 2, 4])
async def test_an_annotation_is_written_again_after_another_writer(losses: int) -> None:
    server, version = Contested(losses), str(losses + 1)
    assert (await annotate(server))["metadata"]["resourceVersion"] == version, "the pod as it was before"
    assert server.written == {"uid": "uid-a", "resourceVersion": version, "annotations": {"key": f"text for {version}"}}


async def test_a_pod_that_others_keep_changing_is_said() -> None:
    with pytest.raises(GpumgrError, match="the annotation key can't be written: other programs keep changing the pod"):
        await annotate(Contested(5))


@pytest.mark.parametrize(
    ("name", "code", "out", "err"),
    [
        ("away", 0, "main: suspended\n", ""),
        ("works", 1, "main: running\n", "not all containers are suspended yet"),
        ("sidecar", 1, "setup: running\nmain: suspended\n", "not all containers are suspended yet"),
        ("ended", 1, "", "the containers of the pod that had GPUs have ended"),
        ("empty", 1, "", "the pod has no annotation gpumgr.io/allocations"),
        ("none", 1, "", "the pod has no annotation gpumgr.io/allocations"),
    ],
)
async def test_suspend_waits_for_the_containers_that_have_not_ended(
    name: str, code: int, out: str, err: str, kubeconfig: Path, gpumgr_command: Gpumgr
) -> None:
    ended = await gpumgr_command("suspend", f"team/{name}", "--wait", "0.01", "--kubeconfig", kubeconfig)
    assert (ended.code, ended.out) == (code, out)
    assert err in ended.err
