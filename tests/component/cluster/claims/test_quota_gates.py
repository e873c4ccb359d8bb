"""Gates of pods: removed in order as the quota of both modes allows, refused with one event for each reason."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.background import until
from tests.component.cluster.scheduler import conftest as plugin

from .conftest import GATE, DraObjects, Stage, claim, pod, quota, running


@pytest.fixture(autouse=True)
def limited(dra: DraObjects) -> None:
    dra.sim.put_configmap(quota(100))


async def test_gates_are_removed_in_the_order_of_creation_as_others_end(stage: Stage) -> None:
    await stage.admit("first", 60, created="1")
    await stage.admit("second", 40, created="2")
    stage.gated_pod("fourth", 50, created="4")
    await stage.held_back("fourth")
    assert stage.events("fourth") == [
        "GpuQuotaExceeded: namespace team uses 100 of 100 cores; the pod needs 50; it is scheduled as soon as the quota allows it"
    ]
    stage.gated_pod("fifth", 10, created="5")
    await stage.held_back("fifth")
    for name, cores in (("first", 60), ("second", 40)):
        stage.bind(name, cores)
    await until(lambda: len(stage.watches.pods) == 2)
    assert stage.gated("fourth")
    assert stage.gated("fifth")
    stage.sim.remove("uid-first")
    stage.sim.objects("resourceclaims").remove("claim-first-claim")
    await until(lambda: not stage.gated("fourth") and not stage.gated("fifth"))


async def test_pods_of_plugin_mode_count(stage: Stage) -> None:
    stage.sim.put_node(plugin.node("a", 1, plugin.inventory("a", 1)))
    stage.sim.put_document(plugin.pod("old", ("app", 70, 4), on="a"))
    await until(lambda: stage.watches.index.placement("uid-old") is not None)
    stage.gated_pod("new", 40)
    await stage.held_back("new", "uses 70 of 100 cores; the pod needs 40")
    stage.sim.remove("uid-old")
    await stage.opened("new")


async def test_limits_of_gpus_in_plugin_mode_hold_no_claim_back(dra: DraObjects, tmp_path: Path) -> None:
    dra.sim.put_configmap(quota("[{cores: 0, model: H100}]"))
    dra.sim.put_node(plugin.node("plugin", 1, plugin.inventory("plugin", 1, model="NVIDIA H100")))
    dra.put_dra_node("dra", "NVIDIA A100")
    async with running(dra, tmp_path) as stage:
        await stage.admit("one", 10)


async def test_a_pod_waits_for_its_claims(stage: Stage) -> None:
    """Its own template may ask for anything; kube-controller-manager creates the claim."""
    stage.sim.put_document(pod("early", "mine", gates=[GATE]))
    await stage.admit("other", 10, created="2")
    assert stage.gated("early")
    stage.sim.put_document(pod("early", "mine", gates=[GATE], made="early-claim"))
    stage.dra.put("resourceclaims", claim("early-claim", 95, owner="early"))
    await stage.held_back("early", "uses 10 of 100 cores; the pod needs 95")


async def test_a_shared_claim_counts_between_the_binding_of_its_pod_and_its_allocation(stage: Stage) -> None:
    """The watches are apart: the pod may be seen bound before the claim is seen allocated."""
    stage.dra.put("resourceclaims", claim("shared", 90))
    stage.sim.put_document(pod("user", claims=["shared"], gates=[GATE]))
    await stage.opened("user")
    bound = {**stage.sim._pods.items["uid-user"]}
    stage.sim.put_document({**bound, "spec": {**bound["spec"], "nodeName": "a"}})
    await until(lambda: "uid-user" not in stage.watches.pods)
    stage.gated_pod("late", 20)
    await stage.held_back("late", "uses 90 of 100 cores; the pod needs 20")
    stage.dra.put("resourceclaims", claim("shared", 90, on="a"))
    await until(lambda: stage.watches.index.placement("claim-shared") is not None)
    stage.clock.now += 3600
    await stage.admit("probe", 10, created="0")  # a look has passed
    assert stage.gated("late")


async def test_a_shared_claim_of_a_pod_that_was_deleted_counts_no_more_after_a_while(stage: Stage) -> None:
    stage.dra.put("resourceclaims", claim("shared", 90))
    stage.sim.put_document(pod("user", claims=["shared"], gates=[GATE]))
    await stage.opened("user")
    stage.sim.remove("uid-user")
    await until(lambda: "uid-user" not in stage.watches.pods)
    stage.gated_pod("late", 20)
    await stage.held_back("late")
    stage.clock.now += 11
    await stage.opened("late")


async def test_pods_without_gpus_and_other_gates(stage: Stage) -> None:
    """A pod with amounts of 0 has the gate, and no claim."""
    other = {"name": "other"}
    await stage.admit("full", 100)
    stage.sim.put_document(pod("none", gates=[other, GATE]))
    await stage.opened("none")
    assert stage.sim._pods.items["uid-none"]["spec"]["schedulingGates"] == [other]


async def test_the_reason_is_told_again_only_if_it_changes_and_after_a_while(stage: Stage) -> None:
    await stage.admit("first", 60)
    stage.gated_pod("late", 50, created="2")
    await until(lambda: len(stage.events("late")) == 1)
    stage.sim.put_configmap(quota(90))
    await until(lambda: stage.watches.quotas.limits["team"].limits[0].cores == 90)
    stage.gated_pod("probe", 10, created="3")  # a look has passed when it has its event
    await stage.held_back("probe")
    assert len(stage.events("late")) == 1
    stage.clock.now += 60
    await until(lambda: len(stage.events("late")) == 2)
    assert "60 of 90 cores" in stage.events("late")[1]


async def test_another_gate_is_never_removed_by_mistake(stage: Stage) -> None:
    """The gates, or the pod, may be others than the watch has shown."""
    stage.sim.put_configmap(quota(50))
    await until(lambda: stage.watches.quotas.limits["team"].limits[0].cores == 50)
    stage.gated_pod("one", 60)
    await stage.held_back("one")
    known = stage.watches.pods["uid-one"]
    await stage.controller._open(replace(known, uid="uid-before"))
    await stage.controller._open(replace(known, gate=1))
    assert stage.gated("one")
    item = stage.sim._pods.items["uid-one"]
    stage.sim.put_document({**item, "spec": {**item["spec"], "schedulingGates": [{"name": "other"}, GATE]}})
    await stage.controller._open(known)
    await until(lambda: stage.watches.pods["uid-one"].gate == 1)
    stage.sim.put_configmap(quota(200))
    stage.clock.now += 60
    await stage.opened("one")
    assert stage.sim._pods.items["uid-one"]["spec"]["schedulingGates"] == [{"name": "other"}]


async def test_quotas_that_cant_be_read_hold_all_pods_back(dra: DraObjects, tmp_path: Path) -> None:
    dra.sim.put_configmap(quota("5"))
    async with running(dra, tmp_path) as stage:
        stage.gated_pod("one", 10)
        await stage.held_back("one", "can't be used, so the quotas are not known")
        assert stage.gated("one")
        dra.sim.put_configmap(quota(100))
        await stage.opened("one")


async def test_limits_of_a_model_use_the_slices_of_the_nodes(dra: DraObjects, tmp_path: Path) -> None:
    dra.sim.put_configmap(quota("[{cores: 100, model: A100}, {memory: 3Gi, model: V100}]"))
    for name, model, memory in (("a", "NVIDIA A100", "40Gi"), ("v", "Tesla V100", "2Gi")):
        dra.put_dra_node(name, model, memory, {"gaia.tencent.com/gpu-model": model.rpartition(" ")[2]})
    async with running(dra, tmp_path) as stage:
        await stage.admit("first", 90)
        stage.bind("first", 90)
        await until(lambda: stage.watches.index.placement("claim-first-claim") is not None)
        stage.gated_pod("any", 20)
        await stage.held_back("any", "uses 90 of 100 cores on A100")
        picky = pod("picky", "vcuda-c0-20-4", gates=[GATE], made="picky-claim", created="0")
        picky["spec"]["nodeSelector"] = {"gaia.tencent.com/gpu-model": "V100"}
        stage.sim.put_document(picky)
        stage.dra.put("resourceclaims", claim("picky-claim", 20, owner="picky"))
        await stage.opened("picky")


async def test_limits_of_a_model_hold_while_all_slices_are_withdrawn(dra: DraObjects, tmp_path: Path) -> None:
    """Agents that are updated withdraw their slices for a while; the claims of a pod without its gate are allocated afterwards."""
    dra.sim.put_configmap(quota("[{cores: 50, model: A100}]"))
    dra.put_dra_node("a", "A100")
    async with running(dra, tmp_path) as stage:
        await stage.admit("first", 40)
        stage.bind("first", 40)
        await until(lambda: stage.watches.index.placement("claim-first-claim") is not None)
        dra.sim.objects("resourceslices").remove("a")
        await until(lambda: not stage.watches._slices)
        stage.gated_pod("second", 40, created="2")
        await stage.held_back("second", "uses 40 of 50 cores on A100")
    async with running(dra, tmp_path) as restarted:  # it has never seen the slice
        restarted.gated_pod("third", 40, created="0")
        await restarted.held_back("third", "uses 40 of 50 cores on A100")
