"""`gpumgr resize`: wrong input, and pods that can't be resized. tests/agent/test_resize.py has the command with an agent."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpumgr.sim.apiserver import SimApiServer

from .conftest import Gpumgr

Json = dict[str, Any]
GPU = {"tencent.com/vcuda-core": "30"}


def pod(name: str, *allocated: str, claim: bool = False, phase: str = "Running") -> Json:
    """`allocated`: its containers with shares."""
    resources: Json = {"claims": [{"name": "gpu"}]} if claim else {"limits": GPU}
    annotations = {"gpumgr.io/allocations": json.dumps([{"container": each} for each in allocated])} if allocated else {}
    return {
        "metadata": {"namespace": "team", "name": name, "uid": f"uid-{name}", "annotations": annotations},
        "spec": {"containers": [{"name": "main", "resources": resources}]},
        "status": {"phase": phase},
    }


@pytest.fixture
async def kubeconfig(folder: Path) -> AsyncIterator[Path]:
    async with SimApiServer("node") as api:
        for document in (
            pod("two", "main", "side"),
            pod("claim", "main", claim=True),
            pod("none"),
            pod("ended", "main", phase="Succeeded"),
            pod("lonely", "main"),
        ):
            api.put_document(document)
        yield api.kubeconfig(folder / "kubeconfig")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["team/two"], 2, "nothing to change: give --cores N, --memory MIB, or both"),
        (["team/two", "--cores", "100"], 2, "100 is not in the range 1<=x<=99"),
        (["team/two", "--memory", "0"], 2, "0 is not in the range x>=1"),
        (["a/b/c", "--cores", "1"], 2, "'a/b/c' is not a pod's name"),
        (["team/two", "--cores", "1"], 2, "several containers of the pod have GPUs: give --container with one of main, side"),
        (["team/two", "--cores", "1", "--container", "x"], 1, "container x has no share of a GPU by gpumgr"),
        (["team/claim", "--cores", "1"], 1, "the capacity of a claim is fixed by the API"),
        (["team/none", "--cores", "1"], 1, "no container of the pod has"),
        (["team/ended", "--cores", "1"], 1, "the pod has ended"),
        (["team/missing", "--cores", "1"], 1, "there is no pod team/missing; name it as NAMESPACE/POD"),
    ],
)
async def test_what_can_not_be_resized_is_refused_with_the_reason(
    arguments: list[str], code: int, message: str, kubeconfig: Path, gpumgr_command: Gpumgr
) -> None:
    ended = await gpumgr_command("resize", *arguments, "--kubeconfig", kubeconfig)
    assert (ended.code, ended.out) == (code, "")
    assert message in ended.err


async def test_without_a_kubeconfig_it_asks_for_one(gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command("resize", "team/two", "--cores", "1")
    assert ended.code == 2
    assert "there is no kubeconfig: give --kubeconfig FILE" in ended.err


async def test_a_node_that_does_not_answer_is_said(
    kubeconfig: Path, gpumgr_command: Gpumgr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpumgr.cli.resize._ANSWER_SECONDS", 0.1)
    ended = await gpumgr_command("resize", "team/lonely", "--cores", "1", "--kubeconfig", kubeconfig)
    assert ended.code == 1
    assert "the agent of the pod's node has not answered within 0.1 s; the request stays in the annotation" in ended.err
