"""The limits from ResourceQuotas and the ConfigMap: its formats, both together, in any number."""

from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core.quota import Limit, NamespaceQuota, Quotas
from gpumgr.cluster.scheduler import quota_sources
from gpumgr.cluster.scheduler.quota_sources import QuotaSources, WatchedQuotas, WatchedResourceQuota, parse_quotas


def parsed(**data: str) -> WatchedQuotas:
    return parse_quotas({"metadata": {"uid": "u"}, "data": {key.replace("__", "."): text for key, text in data.items()}})


def allowed(**gpus: int) -> NamespaceQuota:
    limits = tuple(Limit(label=model, cores=100 * count) for model, count in gpus.items())
    return NamespaceQuota(limits=limits, labels=frozenset(gpus))


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("{}", {}),
        (
            '{"team":{"quota":{"M40":8,"P100":2},"pool":["public"]}}',
            {"team": replace(allowed(M40=8, P100=2), pools=frozenset(["public"]))},
        ),
        ('{"team":{"quota":{"M40":1},"pool":[]}}', {"team": allowed(M40=1)}),
        ('{"team":{"quota":{"M40":0}}}', {"team": allowed(M40=0)}),
        ('{"team":{"quota":null,"pool":null,"unknown":1}}', {"team": allowed()}),
        ('{"team":{}}', {"team": allowed()}),
        ('{"team":null}', {"team": allowed()}),
    ],
)
def test_gpu_admissions_format(text: str, limits: Any) -> None:
    assert parsed(gpu_quota=text) == WatchedQuotas(uid="u", limits=limits)


def test_the_plain_format_and_both_together() -> None:
    text = """
team:
  - {cores: 800, memory: 320Gi, gpus: 4}
  - {cores: 400, model: A100, pool: public}
  - {gpus: 0, pool: research}
"""
    limits = (
        Limit(cores=800, memory_mebibytes=320 * 1024, gpus=4),
        Limit(cores=400, model="A100", pool="public"),
        Limit(gpus=0, pool="research"),
    )
    assert parsed(quota__yaml=text).limits == {"team": NamespaceQuota(limits=limits)}
    both = parsed(quota__yaml=text, gpu_quota='{"team":{"quota":{"M40":8}}}').limits["team"]
    assert both == replace(allowed(M40=8), limits=(Limit(label="M40", cores=800), *limits))
    assert parsed(quota__yaml="").limits == {}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "neither the key gpu_quota nor the key quota.yaml"),
        ({}, "neither the key gpu_quota nor the key quota.yaml"),
        ({"other": "{}"}, "neither the key"),
        ({"gpu_quota": ""}, "key gpu_quota: "),
        ({"gpu_quota": "{"}, "key gpu_quota: "),
        ({"gpu_quota": "[]"}, "Expected `object`, got `array`"),
        ({"gpu_quota": '{"team":{"quota":{"M40":0.5}}}'}, "key gpu_quota: "),
        ({"gpu_quota": '{"team":{"quota":{"M40":1e30}}}'}, "key gpu_quota: "),
        ({"quota__yaml": "team: {cores: 1}"}, "key quota.yaml: Expected `array`, got `object`"),
        ({"quota__yaml": "team: [{}]"}, "none of cores, memory, gpus"),
        ({"quota__yaml": "team: [{core: 1}]"}, "unknown field `core`"),
        ({"quota__yaml": "team: [{cores: -1}]"}, "key quota.yaml: "),
        ({"quota__yaml": "team: [{memory: 1.5}]"}, "key quota.yaml: "),
        ({"quota__yaml": "team: [{memory: 1.5Mi, cores: ]"}, "key quota.yaml: "),
        ({"quota__yaml": "team: [{memory: -1}]"}, "quantity '-1'"),
        ({"quota__yaml": "? [a]\n: []"}, "key quota.yaml: "),
        ({"quota__yaml": "[" * 100_000}, "key quota.yaml: "),
    ],
)
def test_an_unusable_text_is_a_problem_with_its_place(data: dict[str, str] | None, problem: str) -> None:
    found = parsed(**data) if data is not None else parse_quotas({"metadata": {"uid": "u"}})
    assert (problem in (found.problem or ""), found.limits) == (True, {}), found.problem
    assert "\n" not in (found.problem or "")


def hard(uid: str, namespace: str = "team", **limit: Any) -> WatchedResourceQuota:
    return WatchedResourceQuota(uid=uid, namespace=namespace, limit=Limit(**limit) if limit else None)


def configured(cores: int) -> WatchedQuotas:
    return parsed(quota__yaml=f"team: [{{cores: {cores}}}]")


def test_all_limits_of_a_namespace_hold() -> None:
    quotas = Quotas()
    sources = QuotaSources(quotas, "a/b")
    sources.configmap_changed(None, configured(100))
    first, second, other = hard("1", cores=50), hard("2", memory_mebibytes=7), hard("3", "other", cores=1)
    for each in (first, second, other, hard("4", "none")):
        sources.resource_quota_changed(None, each)
    assert quotas.limits == {
        "team": NamespaceQuota(limits=(Limit(cores=100), Limit(cores=50), Limit(memory_mebibytes=7))),
        "other": NamespaceQuota(limits=(Limit(cores=1),)),
    }
    before = quotas.state("team")
    sources.resource_quota_changed(first, hard("1", cores=60))
    sources.resource_quota_changed(other, None)
    assert before != quotas.state("team"), "a pod that waits for its quota is tried again"
    sources.configmap_changed(configured(100), None)
    assert quotas.limits == {"team": NamespaceQuota(limits=(Limit(memory_mebibytes=7), Limit(cores=60)))}


def test_a_change_joins_the_limits_of_its_namespace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_sources, "replace", joined := Mock(side_effect=replace))
    quotas = Quotas()
    sources = QuotaSources(quotas, "a/b")
    for number in range(1000):
        sources.resource_quota_changed(None, hard("u", f"team-{number}", cores=number))
    assert (joined.call_count, len(quotas.limits)) == (1000, 1000)


def test_a_namespace_without_resourcequotas_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    sources, quota, limits = QuotaSources(Quotas(), "a/b"), hard("u", cores=1), configured(100)
    sources.resource_quota_changed(None, quota)
    sources.resource_quota_changed(quota, None)
    monkeypatch.setattr(quota_sources, "replace", pytest.fail)
    sources.configmap_changed(None, limits)


@pytest.mark.parametrize("item", [{"metadata": {}}, {}, {"metadata": {"uid": "u"}, "data": "text"}])
def test_an_object_that_is_no_configmap(item: dict[str, Any]) -> None:
    with pytest.raises((KeyError, AttributeError)):
        parse_quotas(item)
