"""Quotas of the ConfigMap in filter and bind."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core import node_search
from gpumgr.cluster.core.choose import choose
from gpumgr.cluster.core.node import GpuState, node_of_equal_gpus
from gpumgr.cluster.core.quota import Limit, NamespaceQuota
from gpumgr.cluster.scheduler import watches
from gpumgr.cluster.scheduler.node_rows import NodeRows
from gpumgr.cluster.scheduler.objects import WatchedNode
from gpumgr.cluster.scheduler.quota_sources import WatchedQuotas, parse_quotas
from gpumgr.cluster.scheduler.reasons import WaitingReasons
from gpumgr.common import aio
from gpumgr.common.units import Amounts
from gpumgr.kube.cluster_annotations import InventoryGpu
from tests.background import loop_turns, until
from tests.cluster_api import ClusterApiServer

from .conftest import GPU_MEBIBYTES, Json, Stage, inventory, node, pod, running

UID = "uid-gpuquota"


def configmap(**data: str) -> Json:
    return {"metadata": {"name": "gpuquota", "namespace": "kube-system", "uid": UID}, "data": data}


def admission(cores: int) -> Json:
    """gpu-admission's format, for namespace team: GPUs of model A100 (node a), in pool public."""
    return configmap(gpu_quota=json.dumps({"team": {"quota": {"A100": cores // 100}, "pool": ["public"]}}))


async def change(stage: Stage, item: Json) -> None:
    before, stage.quotas.limits = stage.quotas.limits, {}
    assert before is not stage.quotas.limits
    stage.sim.put_configmap(item)
    await until(lambda: bool(stage.quotas.limits))


@pytest.fixture(autouse=True)
async def labels(sim: ClusterApiServer) -> None:
    for name, model, pool in (("a", "A100", "public"), ("b", "V100", "research")):
        item = node(name, 4, inventory(name, 4))
        item["metadata"]["labels"] = {"gaia.tencent.com/gpu-model": model, "gaia.tencent.com/gpu-pool": pool}
        sim.put_node(item)


async def reason(stage: Stage, name: str) -> tuple[str | None, str]:
    """Why the page says that the pod waits."""
    rows = NodeRows(stage.watches)
    await rows.refresh()
    return await WaitingReasons(stage.watches, rows, "binpack").kind(stage.watches.pending[f"uid-{name}"], {})


def rejection(answer: Json) -> str:
    assert (answer["NodeNames"], answer["Error"]) == ([], "")
    ((_, text),) = answer["FailedAndUnresolvableNodes"].items()
    return str(text)


async def test_gpu_admissions_quota_limits_the_nodes_and_the_amount(stage: Stage) -> None:
    assert await stage.schedule(pod("before", ("app", 100, 0)), ["a"]) == "a"
    await change(stage, admission(200))
    assert await stage.schedule(pod("one", ("app", 60, 4))) == "a"
    assert rejection(await stage.filter(pod("two", ("app", 60, 4)), ["a"])) == (
        "for the quota of 1 node: namespace team uses 160 of 200 cores on A100; the pod needs 60"
    )
    assert "namespace team has no quota for model V100; its models: A100" in rejection(
        await stage.filter(pod("two", ("app", 60, 4)))
    )
    await stage.end("before")
    assert await stage.filtered(pod("two", ("app", 60, 4))) == ["a"]


async def test_a_burst_does_not_pass_the_quota(stage: Stage) -> None:
    await change(stage, configmap(**{"quota.yaml": "team: [{cores: 200}]"}))
    items = [await stage.create(pod(f"p{number}", ("app", 50, 4))) for number in range(8)]
    answers = await asyncio.gather(*(stage.filter(item) for item in items))
    assert sum(bool(answer["NodeNames"]) for answer in answers) == 4
    await asyncio.gather(*(stage.bind(item, "b") for item in items))
    assert sum(sum(stage.cores(name)) for name in "ab") == 200


async def test_bind_validates_the_quota_again(stage: Stage) -> None:
    item = await stage.create(pod("one", ("app", 50, 4)))
    await stage.filter(item)
    await change(stage, configmap(**{"quota.yaml": "team: [{cores: 40}]"}))
    assert await stage.bind(item, "a") == "namespace team uses 0 of 40 cores; the pod needs 50"
    assert "bind" not in stage.sim.requests
    assert stage.cores("a") == [0] * 4


async def test_filter_and_bind_know_the_gpus_that_the_quota_allows(stage: Stage) -> None:
    gpus = tuple(
        InventoryGpu(uuid=f"GPU-mixed-{place}", model=model, memory=16384) for place, model in enumerate(("A100", "V100"))
    )
    await stage.show_nodes(node("mixed", 2, inventory("mixed", 2, gpus=gpus)))
    await change(stage, configmap(**{"quota.yaml": "team: [{cores: 0, model: A100}, {cores: 100, model: V100}]"}))
    assert await stage.schedule(pod("filtered", ("app", 50, 4)), ["mixed"]) == "mixed"
    item = await stage.create(pod("never-filtered", ("app", 50, 4)))
    assert await stage.bind(item, "mixed") == ""
    await until(lambda: stage.cores("mixed") == [0, 100])
    item = await stage.create(pod("too-much", ("app", 50, 4)))
    assert "of 0 cores on A100; the pod needs 50" in await stage.bind(item, "mixed")


async def test_the_configmap_is_parsed_on_a_thread(
    sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[int]()

    def noted(item: Json) -> WatchedQuotas:
        threads.add(threading.get_ident())
        return parse_quotas(item)

    monkeypatch.setattr(watches, "parse_quotas", noted)
    sim.put_configmap(admission(100))
    async with running(sim, tmp_path) as stage:
        assert "team" in stage.quotas.limits, "synced includes the quotas"
    assert threads
    assert threading.get_ident() not in threads


async def test_the_last_quotas_that_could_be_read_stay(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    """If there are none, no pod is placed: as gpu-admission, which answers with an error until it has read its quota."""
    stage.sim.put_configmap(configmap(gpu_quota="{"))
    await until(lambda: stage.quotas.problem is not None)
    error = (await stage.filter(pod("one", ("app", 60, 4))))["Error"]
    assert error.startswith("ConfigMap kube-system/gpuquota can't be used, so the quotas are not known: key gpu_quota: ")
    assert error.endswith("; correct it or delete it")
    assert await stage.bind(await stage.create(pod("one", ("app", 60, 4))), "a") == error
    await change(stage, admission(100))
    stage.sim.put_configmap(configmap(gpu_quota="[]"))
    await until(lambda: capfd.readouterr().out.count("quotas_unusable") > 0)
    assert rejection(await stage.filter(pod("one", ("app", 200, 0)), ["a"])).endswith("0 of 100 cores on A100; the pod needs 200")
    stage.sim.remove_configmap(UID)
    await until(lambda: not stage.quotas.limits)
    assert await stage.filtered(pod("one", ("app", 200, 0)), ["a"]) == ["a"]


@pytest.mark.parametrize("asked", ["filter", "retry", "page"])
async def test_nodes_with_different_gpus_are_examined_in_slices(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """The quota allows the V100s, and these have no room."""
    monkeypatch.setattr(aio, "SLICE_SECONDS", -1.0)
    gpus = tuple(GpuState(model=model, memory_mebibytes=GPU_MEBIBYTES) for model in ("A100", "V100"))
    names = [f"n{number}" for number in range(60)]
    for number, name in enumerate(names):
        used = {"old-a": ((0, Amounts(number, 256)),), "old-v": ((1, Amounts(45, 256)),)}
        state = replace(node_of_equal_gpus(name, 200, 2), gpus=gpus, reported_shares=used)
        stage.index.set_node(state)
        stage.watches.nodes[name] = WatchedNode(uid=name, state=state)
    stage.quotas.limits = {"team": NamespaceQuota(limits=(Limit(cores=40, model="A100"),), labels=frozenset([""]))}
    await stage.show(item := pod("one", ("app", 30, 4), ("app", 30, 4)))
    if asked == "retry":
        assert await stage.filtered(item, names) == []
        stage.quotas.limits = {"team": NamespaceQuota(limits=(Limit(cores=41, model="A100"),), labels=frozenset([""]))}
        for profile in stage.index.profiles.there(stage.index.profiles.all, idle=False):
            profile.choices.clear()  # as after many other requests
        stage.clock.now += 2
    choices = list[int]()

    def counted(*arguments: Any) -> Any:
        choices.append(turns())
        return choose(*arguments)

    monkeypatch.setattr(node_search, "choose", counted)
    async with loop_turns() as turns:
        if asked == "filter":
            assert await stage.filtered(item, names) == []
        elif asked == "retry":
            assert await stage.extender.retryable() is None
        else:
            assert (await reason(stage, "one"))[0] == "quota"
    assert len(choices) >= 60
    assert len(choices) == len(set(choices)), "each choice is a step of its own"


async def test_the_first_node_that_fits_shows_that_the_quota_allows_a_pod(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of pods may wait although GPUs are free: for CPU, for example."""
    await stage.show_nodes(*(node(f"n{number}", number, inventory(f"n{number}", number)) for number in range(2, 22)))
    await stage.show(pod("one", ("app", 40, 8), ("app", 30, 8)))
    stage.limit(cores=10_000)
    monkeypatch.setattr(node_search, "choose", counted := Mock(side_effect=choose))
    assert (await reason(stage, "one"), counted.call_count) == (("elsewhere", ""), 2)
