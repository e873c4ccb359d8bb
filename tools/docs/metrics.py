"""The tables of metrics."""

from collections.abc import Iterator

from gpumgr.cluster.claims import lifecycle as claims
from gpumgr.cluster.scheduler import metrics as scheduler
from gpumgr.common.prometheus_text import Family
from gpumgr.compat.gpu_manager import metrics as gpu_manager
from gpumgr.compat.hami.metrics import render_hami
from gpumgr.web.metrics.registry import catalogue
from tests.unit.web.metrics.pages import full_picture
from tools.docs.markdown import code, table

_HEAD = ("metric", "meaning")


def metrics_table() -> str:
    """gpumgr's metrics, by name."""
    return table(_HEAD, ((_series(name, labels), about) for name, _, labels, about in catalogue()))


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
    """HAMi's metrics, which `metrics.hami_names` adds: the new and the old names of each value."""
    names: dict[str, list[str]] = {}
    for block in render_hami(full_picture(), (), node=""):
        names.setdefault(block.family.about, []).append(code(block.family.name))
    return table(("metrics", "meaning"), ((", ".join(each), about) for about, each in names.items()))


def _gpu_managers() -> Iterator[Family]:
    return (value for value in vars(gpu_manager).values() if isinstance(value, Family))


def _row(family: Family) -> tuple[str, ...]:
    return _series(family.name, family.labels), family.about


def _series(name: str, labels: tuple[str, ...]) -> str:
    """The name with its labels, as PromQL has them."""
    return code(f"{name}{{{','.join(labels)}}}" if labels else name)
