"""The tables of metrics."""

from gpumgr.cluster.claims import lifecycle as claims
from gpumgr.cluster.scheduler import metrics as scheduler
from gpumgr.common.prometheus_text import Family
from gpumgr.compat.gpu_manager import metrics as gpu_manager
from gpumgr.compat.hami.metrics import render_hami
from gpumgr.web.metrics import catalogue
from tests.unit.web.metrics.pages import full_picture
from tools.docs.markdown import code, table

_HEAD = ("metric", "meaning")
#: The kubelet's calls, which are the second word of a metric's name.
CALLS = ("allocate", "prefer", "prepare", "prestart", "unprepare")


def metrics_table() -> str:
    """gpumgr's metrics, by name. The metrics of one kind about the kubelet's calls are in one row."""
    rows = [
        (_series(name, labels) + others, about)
        for name, _, labels, about in catalogue()
        if (others := _other_calls(name)) is not None
    ]
    return table(_HEAD, rows)


def scheduler_table() -> str:
    """Metrics of `gpumgr scheduler`, by name."""
    return table(_HEAD, map(_row, sorted(scheduler.FAMILIES, key=lambda family: family.name)))


def claims_table() -> str:
    """Metrics of `gpumgr claims`, by name."""
    return table(_HEAD, map(_row, sorted(claims.FAMILIES, key=lambda family: family.name)))


def gpu_manager_metrics() -> str:
    """The names of gpu-manager's metrics, which `metrics.gpu_manager_names` adds."""
    return ", ".join(_series(family.name, family.labels) for family in vars(gpu_manager).values() if isinstance(family, Family))


def hami_metrics() -> str:
    """The names of HAMi's metrics, which `metrics.hami_names` adds."""
    return ", ".join(code(block.family.name) for block in render_hami(full_picture(), (), node=""))


def _row(family: Family) -> tuple[str, ...]:
    return _series(family.name, family.labels), family.about


def _series(name: str, labels: tuple[str, ...]) -> str:
    """The name with its labels, as PromQL has them."""
    return code(f"{name}{{{','.join(labels)}}}" if labels else name)


def _other_calls(name: str) -> str | None:
    """What the row of the first call has about the others; None for the other calls' metrics."""
    call = name.split("_")[1]
    if call in CALLS[1:]:
        return None
    return ", also with " + ", ".join(map(code, CALLS[1:])) if call in CALLS else ""
