"""The node's labels and its condition: written on change, kept up, and removed again without touching those of others."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpumgr.kube.publisher.objects import Condition
from gpumgr.sim.apiserver import SimApiServer
from tests.background import until

from .stage import Stage, staged

LABELS = {"gaia.tencent.com/gpu-model": "H100", "nvidia.com/gpu.product": "NVIDIA-H100"}
TROUBLE = Condition(trouble=True, reason="GpuUnhealthy", message="GPU3: XID 79")
HEALTHY = Condition(trouble=False, reason="GpusWork", message="8 GPUs, none in trouble")
#: The kubelet's condition.
READY = {"type": "Ready", "status": "True"}


# -- labels and annotations --------------------------------------------------------------------------------------------------


async def test_an_annotation_is_written_on_change_and_every_ten_minutes_and_removed_once(sim: SimApiServer, stage: Stage) -> None:
    """HAMi's scheduler sets its lock for each pod."""
    sim.written.annotations |= {"theirs": "kept", "hami.io/mutex.lock": "first"}
    stage.publisher.annotate("gpumgr.io/inventory", "long")
    stage.publisher.remove_annotation("hami.io/mutex.lock")
    await stage.written()
    assert sim.written.annotations == {"theirs": "kept", "gpumgr.io/inventory": "long"}
    sim.written.annotations |= {"gpumgr.io/inventory": "as another wrote it", "hami.io/mutex.lock": "second"}
    stage.publisher.annotate("gpumgr.io/inventory", "long")
    assert stage.waiting == 0
    stage.time.now += 600
    stage.publisher.annotate("gpumgr.io/inventory", "long")
    await stage.written()
    assert sim.written.annotations == {"theirs": "kept", "gpumgr.io/inventory": "long", "hami.io/mutex.lock": "second"}
    stage.publisher.annotate("gpumgr.io/enforcement", "mps")
    await stage.written()
    assert sim.written.annotations["gpumgr.io/enforcement"] == "mps"
    assert sim.requests == ["annotate"] * 3


async def test_labels_that_no_longer_hold_are_removed(sim: SimApiServer, stage: Stage) -> None:
    sim.written.labels.update({"zone": "a", "nvidia.com/gpu.count": "of-others"})
    stage.publisher.label({**LABELS, "nvidia.com/gpu.count": "8"})
    await stage.written()
    assert sim.written.labels == {"zone": "a", "nvidia.com/gpu.count": "of-others", **LABELS}
    assert sim.written.annotations == {"gpumgr.io/labels": "gaia.tencent.com/gpu-model,nvidia.com/gpu.product"}
    stage.publisher.label({"gaia.tencent.com/gpu-model": "H200"})
    await stage.written()
    assert sim.written.labels == {"zone": "a", "nvidia.com/gpu.count": "of-others", "gaia.tencent.com/gpu-model": "H200"}
    assert sim.written.annotations == {"gpumgr.io/labels": "gaia.tencent.com/gpu-model"}
    assert sim.requests == ["node", "label"] * 2


@pytest.mark.parametrize(
    ("labels", "managers"), [({"nvidia.com/gfd.timestamp": "1"}, []), ({}, ["kubelet", "gpu-feature-discovery"])]
)
async def test_where_gpu_feature_discovery_labels_the_node_its_labels_are_left_alone(
    labels: dict[str, str], managers: list[str], sim: SimApiServer, stage: Stage
) -> None:
    present = {"nvidia.com/gpu.product": "theirs", "nvidia.com/gpu.count": "was-ours", **labels}
    sim.written.labels.update(present)
    sim.written.managers += managers
    sim.written.annotations["gpumgr.io/labels"] = "nvidia.com/gpu.count"
    stage.publisher.label({**LABELS, "nvidia.com/gpu.memory": "1"})
    await stage.written()
    assert sim.written.labels == {**present, "gaia.tencent.com/gpu-model": "H100"}
    assert sim.written.annotations == {"gpumgr.io/labels": "gaia.tencent.com/gpu-model"}


# -- the condition -----------------------------------------------------------------------------------------------------------


async def test_the_condition_is_written_on_change_and_every_ten_minutes(sim: SimApiServer, stage: Stage) -> None:
    sim.written.conditions["Ready"] = READY
    stage.publisher.set_condition(TROUBLE)
    await stage.written()
    assert sim.written.conditions["GpuTrouble"] == {
        "type": "GpuTrouble",
        "status": "True",
        "reason": "GpuUnhealthy",
        "message": "GPU3: XID 79",
        "lastHeartbeatTime": "2027-01-15T08:00:00Z",
        "lastTransitionTime": "2027-01-15T08:00:00Z",
    }
    for _ in range(20):
        stage.time.now += 60
        stage.publisher.set_condition(TROUBLE)
        await stage.written()
    condition = sim.written.conditions["GpuTrouble"]
    assert (condition["lastHeartbeatTime"], condition["lastTransitionTime"]) == ("2027-01-15T08:20:00Z", "2027-01-15T08:00:00Z")
    stage.publisher.set_condition(HEALTHY)
    await stage.written()
    assert (condition["status"], condition["lastTransitionTime"]) == ("False", "2027-01-15T08:20:00Z")
    assert sim.requests == ["node", "condition"] * 4
    assert sim.written.conditions["Ready"] == READY


async def test_a_condition_that_is_set_again_after_its_removal_begins_anew(sim: SimApiServer, stage: Stage) -> None:
    for condition in (TROUBLE, None, TROUBLE):
        stage.publisher.set_condition(condition)
        await stage.written()
        assert ("GpuTrouble" in sim.written.conditions) == (condition is not None)
        stage.time.now += 60
    assert sim.written.conditions["GpuTrouble"]["lastTransitionTime"] == "2027-01-15T08:02:00Z"


async def test_a_text_that_changes_each_second_is_written_every_ten_seconds_and_another_status_at_once(
    sim: SimApiServer, stage: Stage
) -> None:
    for second in range(120):
        stage.publisher.set_condition(Condition(trouble=True, reason="GpuUnhealthy", message=f"{second} errors"))
        await asyncio.sleep(0.001)
        stage.time.now += 1
    assert 2 <= sim.requests.count("condition") <= stage.time.now / 10 + 2
    slept = stage.time.now
    stage.publisher.set_condition(HEALTHY)
    await until(lambda: sim.written.conditions["GpuTrouble"]["status"] == "False")
    assert stage.time.now - slept < 1


async def test_the_condition_of_an_earlier_process_goes_on(sim: SimApiServer, stage: Stage) -> None:
    before = {
        "type": "GpuTrouble",
        "status": "True",
        "reason": "GpuUnhealthy",
        "message": "GPU3: XID 79",
        "lastHeartbeatTime": "2027-01-15T07:59:00Z",
        "lastTransitionTime": "2027-01-14T08:00:00Z",
    }
    sim.written.conditions["GpuTrouble"] = dict(before)
    stage.publisher.set_condition(Condition(trouble=True, reason="GpuLost", message="GPU3 is gone"))
    await stage.written()
    condition = sim.written.conditions["GpuTrouble"]
    assert (condition["reason"], condition["lastTransitionTime"]) == ("GpuLost", "2027-01-14T08:00:00Z")


# -- removal -----------------------------------------------------------------------------------------------------------------


async def describe(sim: SimApiServer, stage: Stage) -> None:
    stage.publisher.label(LABELS)
    stage.publisher.set_condition(TROUBLE)
    await stage.written()
    assert "GpuTrouble" in sim.written.conditions
    assert sim.written.labels == {"zone": "a", **LABELS}


async def remove(stage: Stage) -> None:
    stage.publisher.set_condition(None)
    stage.publisher.label({})
    await stage.written()


def others(sim: SimApiServer) -> None:
    sim.written.labels["zone"] = "a"
    sim.written.annotations["theirs"] = "1"
    sim.written.conditions["Ready"] = READY


@pytest.mark.parametrize("later", [False, True], ids=["the same process", "a later process"])
async def test_labels_annotation_and_condition_are_removed_with_a_line_in_the_log(
    later: bool, sim: SimApiServer, stage: Stage, tmp_path: Path
) -> None:
    others(sim)
    await describe(sim, stage)
    async with staged(sim.kubeconfig(tmp_path / "again")) as again:
        with capture_logs() as logs:
            await remove(again if later else stage)
    written = sim.written
    assert (written.labels, written.annotations, written.conditions) == ({"zone": "a"}, {"theirs": "1"}, {"Ready": READY})
    assert [(line["event"], line["what"]) for line in logs] == [
        ("node_description_removed", "labels"),
        ("node_description_removed", "condition"),
    ]
    if not later:
        await describe(sim, stage)


async def test_where_nothing_is_to_be_removed_nothing_is_written(sim: SimApiServer, stage: Stage) -> None:
    with capture_logs() as logs:
        await remove(stage)
        stage.time.now += 600
        await remove(stage)
    assert sim.requests == ["node"] * 2
    assert logs == []


@pytest.mark.parametrize("forbidden", [{("get", "nodes")}, {("patch", "nodes"), ("patch", "nodes/status")}])
async def test_a_removal_without_the_right_is_no_warning(
    forbidden: set[tuple[str, str]], sim: SimApiServer, stage: Stage
) -> None:
    others(sim)
    await describe(sim, stage)
    sim.forbidden |= forbidden
    with capture_logs() as logs:
        await remove(stage)
    assert "GpuTrouble" in sim.written.conditions
    assert [(line["event"], line["what"], line["log_level"]) for line in logs] == [
        ("node_description_left", "labels", "info"),
        ("node_description_left", "condition", "info"),
    ]
    assert ("node", "refused") not in stage.publisher.state().written
