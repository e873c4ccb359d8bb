"""A picture as a scraper reads it: the page's text, and what a parser finds there."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from gpumgr.agent.api import Cordon
from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.common.prometheus_text import RenderedFamily, page
from gpumgr.ledger.gpu_share import GpuLimits
from gpumgr.ledger.join import join
from gpumgr.ledger.node_use import TurnUse
from gpumgr.ledger.suspension import Suspension
from gpumgr.placement.pods import PodView
from gpumgr.settings.schema import MetricsSettings
from gpumgr.web.metrics import Clocks, Metrics
from tests.unit.ledger.samples import container, sample

from .pictures import allocation, sample_of, uuid_of, view_of, whole

#: A series: its labels, in the alphabetical order of their names, by their values.
Series = Mapping[tuple[str, ...], float]


def metrics_of(
    report: NodeReport | None,
    pods: Iterable[PodView] = (),
    *,
    clocks: Clocks = (lambda: 110.0, lambda: 5000.0),
    gpu_manager_names: bool = True,
    hami_names: bool = False,
) -> Metrics:
    metrics = Metrics(
        node="node-1",
        version="1",
        pods=lambda: pods,
        names=MetricsSettings(gpu_manager_names=gpu_manager_names, hami_names=hami_names),
        clocks=clocks,
        process=False,
    )
    if report is not None:
        metrics.set_report(report)
    return metrics


def text_of(metrics: Metrics, *, openmetrics: bool = False) -> str:
    return page(metrics.render(), openmetrics=openmetrics).decode()


def families(metrics: Metrics) -> Mapping[str, Metric]:
    """By name, which for counters lacks `_total`."""
    return _read(list(metrics.render()))


def _read(blocks: Sequence[RenderedFamily]) -> Mapping[str, Metric]:
    """Both formats must say the same, and nothing twice."""
    classic = list(parse_classic(page(blocks, openmetrics=False).decode()))
    modern = list(parse_openmetrics(page(blocks, openmetrics=True).decode()))  # type: ignore[no-untyped-call]
    assert [(f.name, f.type, f.samples) for f in classic] == [(f.name, f.type, f.samples) for f in modern]
    told = {family.name: family for family in classic}
    assert len(told) == len(classic)
    return told


def series(metrics: Metrics, name: str) -> Series:
    """The values of one family; a series that is there twice fails."""
    found: dict[tuple[str, ...], float] = {}
    for family in _read([each for each in metrics.render() if each.family.name == name]).values():
        for each in family.samples:
            key = tuple(value for _, value in sorted(each.labels.items()))
            assert key not in found
            found[key] = each.value
    return found


def ours(report: NodeReport, name: str) -> Series:
    return series(metrics_of(report), f"gpumgr_{name}")


def full_picture() -> NodeReport:
    """With one instance of each item that a report can contain."""
    share, train = allocation("a", ("team", "web"), cores={0: 0b11}, blocks={0: 0b11}), whole("t", ("team", "train"), 1)
    view = view_of(share, train, nvlinks=2, cordoned={uuid_of(0): "maintenance"})
    view = replace(view, suspensions={"a": Suspension(state="suspended")})
    turns = TurnUse(held_seconds=2.5, waited_seconds=7.5, launches=9, overruns=1, memory_bytes_by_kind={"alloc": 700})
    owners = {11: container("a", ("team", "web")), 12: container("t", ("team", "train")), 99: None}
    use = join(view.ledger, sample({11: 700, 99: 5}, {12: 9}, ratios={11: 0.5}), owners)
    containers = {place: replace(each, turns=turns if place[0] == "a" else None) for place, each in use.containers.items()}
    return NodeReport(
        view=view,
        node="node-1",
        sample=sample_of(0, 1),
        sampled_at=100.0,
        nvml_up=True,
        nvml_errors={("nvmlDeviceGetMemoryInfo", 15): 1},
        streams={"tencent.com/vcuda-core": 1},
        reasons={uuid_of(0): "operator"},
        cordons={uuid_of(0): Cordon(reason="a fan")},
        use=replace(use, containers=containers),
        gpu_limits={uuid_of(0): GpuLimits(memory="soft", memory_by="mps", cores="soft", cores_by="mps")},
        vcuda_registrations={"ok": 1},
        mps_daemon_restarts={uuid_of(0): 1},
        api_queue=ApiQueueState(waiting=2, oldest_seconds=1.5, dropped=1, written={("pod", "ok"): 3}),
        connections=2,
        connections_refused=1,
    )
