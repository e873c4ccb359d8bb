"""`gpumgr suspend` and `gpumgr resume`: which containers they wait for. tests/agent/test_suspend.py has the states with an agent."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpumgr.sim.apiserver import SimApiServer

from .conftest import Gpumgr

Json = dict[str, Any]
ENDED: Json = {"terminated": {"exitCode": 0}}
RUNS: Json = {"running": {}}


def pod(name: str, rows: list[Json] | None, *, setup: Json = ENDED, main: Json = RUNS) -> Json:
    """`rows`: what the agent wrote about its containers. `setup`: the state of the init container, `main`: of the other one."""
    return {
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": f"uid-{name}",
            "annotations": {} if rows is None else {"gpumgr.io/allocations": json.dumps(rows)},
        },
        "spec": {"containers": [{"name": "main"}], "initContainers": [{"name": "setup"}]},
        "status": {
            "phase": "Running",
            "initContainerStatuses": [{"name": "setup", "state": setup}],
            "containerStatuses": [{"name": "main", "state": main}],
        },
    }


@pytest.fixture
async def kubeconfig(folder: Path) -> AsyncIterator[Path]:
    setup, main, away = {"container": "setup"}, {"container": "main"}, {"container": "main", "state": "suspended"}
    async with SimApiServer("node") as api:
        for document in (
            pod("away", [setup, away]),
            pod("works", [setup, main]),
            pod("sidecar", [setup, away], setup=RUNS),
            pod("ended", [setup, main], main=ENDED),
            pod("empty", []),
            pod("many", [away, {"left_out": 9}]),
            pod("none", None),
        ):
            api.put_document(document)
        yield api.kubeconfig(folder / "kubeconfig")


@pytest.mark.parametrize(
    ("name", "code", "out", "err"),
    [
        ("away", 0, "main: suspended\n", ""),
        ("many", 0, "main: suspended\n", ""),
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
