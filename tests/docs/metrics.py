"""Every metric as a row."""

from collections.abc import Iterator

from gpumgr.metrics import gpu_manager
from gpumgr.metrics.hami import hami_blocks
from gpumgr.metrics.live import catalogue
from gpumgr.metrics.text import Family
from tests.docs.markdown import code, table
from tests.unit.metrics.pages import full_picture

_HEAD = ("metric", "type", "labels", "meaning")


def metrics_table() -> str:
    """Our own, by name."""
    return table(_HEAD, ((code(name), kind, _labels(labels), about) for name, kind, labels, about in catalogue()))


def gpu_manager_table() -> str:
    """gpu-manager's, where `metrics.gpu_manager_names` is on."""
    return table(_HEAD, map(_row, _gpu_managers()))


def hami_table() -> str:
    """HAMi's, where `metrics.hami_names` is on: each new name, and below it the old one."""
    return table(_HEAD, (_row(block.family) for block in hami_blocks(full_picture(), (), node="")))


def _gpu_managers() -> Iterator[Family]:
    return (value for value in vars(gpu_manager).values() if isinstance(value, Family))


def _row(family: Family) -> tuple[str, ...]:
    return code(family.name), family.kind, _labels(family.labels), family.about


def _labels(labels: tuple[str, ...]) -> str:
    return ", ".join(map(code, labels))
