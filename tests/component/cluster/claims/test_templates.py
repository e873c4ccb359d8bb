"""Templates that pods name: created, bounded, explained, swept."""

from pathlib import Path
from unittest.mock import Mock

from gpumgr.settings.schema import ClaimsSettings
from tests.background import until
from tests.component.cluster.scheduler.conftest import Clock

from .conftest import DraObjects, Stage, claim, pod, running

NAME = "vcuda-c0-30-20"
MANAGED = {"app.kubernetes.io/managed-by": "gpumgr"}


async def test_a_template_is_created_once_for_all_pods_of_a_shape(stage: Stage) -> None:
    for name in ("one", "two"):
        stage.sim.put_document(pod(name, NAME))
    await until(lambda: stage.dra.templates == [f"team/{NAME}"])
    stage.sim.put_document(pod("three", NAME))
    stage.sim.put_document(pod("four", "vcuda-c0-100-0"))
    await until(lambda: stage.dra.templates == ["team/vcuda-c0-100-0", f"team/{NAME}"])
    assert len(stage.dra.posted) == 2
    await until(lambda: dict(stage.controller.writes) == {("template", "ok"): 2})


async def test_a_look_copies_the_names_of_all_templates_once(stage: Stage) -> None:
    """Not for each pod: with many pods and templates a look would take minutes."""
    for place in range(20):
        stage.sim.put_document(pod(f"p{place}", NAME))
    await until(lambda: len(stage.watches.pods) == 20 and bool(stage.watches.templates))
    templates = stage.watches.templates
    stage.watches.templates = Mock(wraps=templates, __contains__=lambda _, key: key in templates)
    await stage.controller._create_templates()
    copies = stage.watches.templates.keys.call_count + stage.watches.templates.items.call_count
    assert 0 < copies < 5, "the running controller may look, too"


async def test_templates_of_others_are_left_alone(stage: Stage) -> None:
    """A user may name a template as they like."""
    mine = {"metadata": {"namespace": "team", "name": "vcuda-mine", "uid": "mine"}}
    stage.dra.put("resourceclaimtemplates", mine)
    await until(lambda: bool(stage.watches.templates))
    stage.sim.put_document(pod("one", "vcuda-mine"))
    stage.sim.put_document(pod("two", "other"))
    stage.sim.put_document(pod("three", NAME))
    await until(lambda: bool(stage.dra.posted))
    assert stage.dra.posted == [f"team/{NAME}"]
    assert stage.events("one") == stage.events("two") == []


async def test_a_name_that_is_no_shape_is_explained_once(stage: Stage) -> None:
    stage.sim.put_document(pod("bad", "vcuda-c0-150-0"))
    await until(lambda: bool(stage.events("bad")))
    stage.clock.now += 3600
    stage.sim.put_document(pod("good", NAME))
    await until(lambda: bool(stage.dra.templates))
    (text,) = stage.events("bad")
    assert text.startswith(
        "GpuClaimTemplateRefused: ResourceClaimTemplate vcuda-c0-150-0 does not exist, and can't be created: request c0"
    )


async def test_a_namespace_has_so_many_templates(dra: DraObjects, tmp_path: Path) -> None:
    async with running(dra, tmp_path, ClaimsSettings(max_templates_per_namespace=2)) as stage:
        for place in (1, 2, 3):
            stage.sim.put_document(pod(f"p{place}", f"vcuda-c0-{place}-1", created=str(place)))
        await until(lambda: bool(stage.events("p3")))
        assert stage.dra.templates == ["team/vcuda-c0-1-1", "team/vcuda-c0-2-1"]
        assert "has 2 templates of gpumgr, the limit" in stage.events("p3")[0]
        assert stage.events("p1") == stage.events("p2") == []
        other = pod("elsewhere", "vcuda-c0-9-1")
        other["metadata"]["namespace"] = "other"
        stage.sim.put_document(other)
        await until(lambda: "other/vcuda-c0-9-1" in stage.dra.templates)


async def test_a_template_that_vanishes_while_a_pod_waits_comes_back(stage: Stage) -> None:
    stage.sim.put_document(pod("one", NAME))
    await until(lambda: bool(stage.watches.templates))
    (uid,) = stage.sim.objects("resourceclaimtemplates").items
    stage.sim.objects("resourceclaimtemplates").remove(uid)
    stage.clock.now += 1
    await until(lambda: stage.dra.posted == [f"team/{NAME}"] * 2)


async def test_a_template_without_use_is_deleted_after_a_day(dra: DraObjects, tmp_path: Path) -> None:
    for name, labels in (("vcuda-c0-1-1", MANAGED), ("vcuda-c0-2-1", MANAGED), ("vcuda-c0-3-1", MANAGED), ("vcuda-c0-4-1", {})):
        dra.put("resourceclaimtemplates", {"metadata": {"namespace": "team", "name": name, "uid": name, "labels": labels}})
    dra.put("resourceclaims", claim("running", 2, template="vcuda-c0-2-1"))
    dra.sim.put_document(pod("waiting", "vcuda-c0-3-1"))
    clock = Clock()
    async with running(dra, tmp_path, clock=clock) as stage:

        async def sweep(seconds: int) -> None:
            clock.now += seconds
            before = stage.controller._swept_at
            await until(lambda: stage.controller._swept_at > before)

        await sweep(60)
        await sweep(24 * 3600 - 1)
        assert len(dra.templates) == 4
        await sweep(60)
        await until(lambda: len(dra.templates) == 3)
        assert "team/vcuda-c0-1-1" not in dra.templates
        dra.sim.objects("resourceclaims").remove("claim-running")
        await until(lambda: not any(stage.watches._claims))
        await sweep(24 * 3600 - 1)
        assert "team/vcuda-c0-2-1" in dra.templates, "a day since its last use"
        await sweep(60)
        await until(lambda: dra.templates == ["team/vcuda-c0-3-1", "team/vcuda-c0-4-1"])
        assert dra.posted == [], "the one that a pod waits for was never deleted"


async def test_a_template_that_another_replica_has_created_is_not_created_again(stage: Stage) -> None:
    stage.dra.refused = [409]
    stage.sim.put_document(pod("one", NAME))
    await until(lambda: stage.controller.writes["template", "ok"] == 1)
    stage.gated_pod("other", 10)
    await until(lambda: not stage.gated("other"))
    assert stage.controller.writes["template", "ok"] == 2, "the one that was refused, and that of the other pod"
    stage.clock.now += 61  # it was deleted before the watch has shown it
    await until(lambda: stage.dra.templates == ["team/vcuda-c0-10-4", f"team/{NAME}"])
