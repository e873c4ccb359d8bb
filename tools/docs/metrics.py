"""The tables of metrics."""

from collections.abc import Iterator

from gpumgr.cluster.claims import pages as claims
from gpumgr.cluster.scheduler import metrics as scheduler
from gpumgr.common.prometheus_text import Family
from gpumgr.compat.gpu_manager import metrics as gpu_manager
from gpumgr.compat.hami.metrics import render_hami
from gpumgr.web.metrics.registry import catalogue
from tests.unit.web.metrics.pages import full_picture
from tools.docs.markdown import code, table

_HEAD = ("metric", "type", "labels", "meaning")


def metrics_table() -> str:
    """gpumgr's metrics, by name."""
    return table(_HEAD, ((code(name), kind, _labels(labels), about) for name, kind, labels, about in catalogue()))


def scheduler_table() -> str:
    """Metrics of `gpumgr scheduler`, by name."""
    return table(_HEAD, map(_row, sorted(scheduler.FAMILIES, key=lambda family: family.name)))


def claims_table() -> str:
    """Metrics of `gpumgr claims`, by name."""
    return table(_HEAD, map(_row, sorted(claims.FAMILIES, key=lambda family: family.name)))


def gpu_manager_table() -> str:
    """gpu-manager's metrics, which `metrics.gpu_manager_names` adds."""
    return table(_HEAD, map(_row, _gpu_managers()))


def hami_table() -> str:
    """HAMi's metrics, which `metrics.hami_names` adds: each new name, and below it the old one."""
    return table(_HEAD, (_row(block.family) for block in render_hami(full_picture(), (), node="")))


def _gpu_managers() -> Iterator[Family]:
    return (value for value in vars(gpu_manager).values() if isinstance(value, Family))


def _row(family: Family) -> tuple[str, ...]:
    return code(family.name), family.kind, _labels(family.labels), family.about


def _labels(labels: tuple[str, ...]) -> str:
    return ", ".join(map(code, labels))
