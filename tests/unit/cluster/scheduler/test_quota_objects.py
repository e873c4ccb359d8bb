"""The two formats of the quota's ConfigMap, and texts that can't be used."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core.quota import Limit, NamespaceQuota
from gpumgr.cluster.scheduler.quota_sources import WatchedQuotas, parse_quotas


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
    assert parsed(gpu_quota=text) == WatchedQuotas(limits=limits)


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
def test_an_unusable_text_is_a_problem_with_its_place(data: dict[str, str], problem: str) -> None:
    found = parsed(**data)
    assert (problem in (found.problem or ""), found.limits) == (True, {}), found.problem
    assert "\n" not in (found.problem or "")


def test_a_namespace_without_data_is_a_problem() -> None:
    assert parse_quotas({"metadata": {"uid": "u"}}).problem is not None
