"""The limits from ResourceQuotas and the ConfigMap: its formats, both together, in any number, without a pause of the loop."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core.quota import Limit, NamespaceQuota, Quotas
from gpumgr.cluster.scheduler import quota_sources
from gpumgr.cluster.scheduler.quota_sources import QuotaSources, QuotaTexts, WatchedQuotas, WatchedResourceQuota, parse_quotas


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


CONFIGURED = Limit(cores=100)


def hard(uid: str, namespace: str = "team", **limit: Any) -> WatchedResourceQuota:
    return WatchedResourceQuota(uid=uid, namespace=namespace, limit=Limit(**limit) if limit else None)


def texts(cores: int) -> QuotaTexts:
    return QuotaTexts(uid="u", data={"quota.yaml": f"team: [{{cores: {cores}}}]"})


class Slow:
    """A decoder that waits; it must run on a thread."""

    def __init__(self) -> None:
        self.entered, self.leave = asyncio.Event(), threading.Event()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def __call__(self, item: Mapping[str, Any]) -> WatchedQuotas:
        assert threading.get_ident() != self._thread
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.leave.wait(10)
        return parse_quotas(item)


@pytest.fixture
async def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    made = Slow()
    monkeypatch.setattr(quota_sources, "parse_quotas", made)
    return made


async def test_all_limits_of_a_namespace_hold() -> None:
    quotas = Quotas()
    sources = QuotaSources(quotas, "a/b")
    running = asyncio.create_task(sources.run())
    sources.configmap_changed(None, texts(100))
    assert not sources.read.is_set()
    await sources.read.wait()
    first, second, other = hard("1", cores=50), hard("2", memory_mebibytes=7), hard("3", "other", cores=1)
    for each in (first, second, other, hard("4", "none")):
        sources.resource_quota_changed(None, each)
    assert quotas.limits == quotas.limits
    assert dict(quotas.limits) == {
        "team": NamespaceQuota(limits=(CONFIGURED, Limit(cores=50), Limit(memory_mebibytes=7))),
        "other": NamespaceQuota(limits=(Limit(cores=1),)),
    }
    assert len(quotas.limits) == 2
    before = quotas.limits
    sources.resource_quota_changed(first, hard("1", memory_mebibytes=7))
    sources.resource_quota_changed(other, None)
    assert before != quotas.limits, "a pod that waits for its quota is tried again"
    sources.configmap_changed(texts(100), None)
    await sources.read.wait()
    assert dict(quotas.limits) == {"team": NamespaceQuota(limits=(Limit(memory_mebibytes=7),))}
    running.cancel()


@pytest.mark.parametrize("spread", [True, False])
def test_resource_quotas_are_joined_once_however_many_change(monkeypatch: pytest.MonkeyPatch, spread: bool) -> None:
    joined: list[object] = []

    def counted(quota: NamespaceQuota, **changes: Any) -> NamespaceQuota:
        joined.append(quota)
        return replace(quota, **changes)

    monkeypatch.setattr(quota_sources, "replace", counted)
    quotas = Quotas()
    sources = QuotaSources(quotas, "a/b")
    for number in range(1000):
        sources.resource_quota_changed(None, hard(f"{number}", f"team-{number}" if spread else "team-1", cores=number))
    assert not joined
    assert len(quotas.limits["team-1"].limits) == (1 if spread else 1000)
    assert quotas.limits.get("none") is None
    assert quotas.limits["team-1"] is quotas.limits["team-1"]
    assert len(joined) == 1


async def test_the_configmap_is_decoded_on_a_thread_and_the_newest_one_counts(slow: Slow) -> None:
    quotas = Quotas()
    sources = QuotaSources(quotas, "a/b")
    running = asyncio.create_task(sources.run())
    sources.configmap_changed(None, texts(100))
    await slow.entered.wait()
    assert not sources.read.is_set()
    sources.configmap_changed(texts(100), texts(200))
    slow.leave.set()
    await sources.read.wait()
    assert dict(quotas.limits) == {"team": NamespaceQuota(limits=(Limit(cores=200),))}
    running.cancel()


async def test_a_configmap_that_arrived_before_an_interruption_is_decoded_after_it(slow: Slow) -> None:
    """A new leader lists everything again, and the ConfigMap has not changed since."""
    quotas = Quotas()
    sources = QuotaSources(quotas, "a/b")
    running = asyncio.create_task(sources.run())
    sources.configmap_changed(None, texts(100))
    await slow.entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    slow.leave.set()
    again = asyncio.create_task(sources.run())
    await sources.read.wait()
    assert dict(quotas.limits) == {"team": NamespaceQuota(limits=(CONFIGURED,))}
    again.cancel()


@pytest.mark.parametrize(
    "item", [{"metadata": {}}, {}, {"metadata": {"uid": "u"}, "data": "text"}, {"metadata": {"uid": "u"}, "data": 3}]
)
def test_an_object_that_is_no_configmap(item: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        QuotaTexts.of(item)
