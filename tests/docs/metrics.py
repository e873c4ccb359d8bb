"""Every metric as a row."""

from collections.abc import Iterator

from gpumgr.metrics import gpu_manager
from gpumgr.metrics.live import catalogue
from gpumgr.metrics.text import Family
from tests.docs.markdown import code, table

_HEAD = ("metric", "type", "labels", "meaning")


def metrics_table() -> str:
    """Our own, by name."""
    return table(_HEAD, ((code(name), kind, _labels(labels), about) for name, kind, labels, about in catalogue()))


def gpu_manager_table() -> str:
    """gpu-manager's, where `metrics.gpu_manager_names` is on."""
    return table(_HEAD, ((code(f.name), f.kind, _labels(f.labels), f.about) for f in _gpu_managers()))


def _gpu_managers() -> Iterator[Family]:
    return (value for value in vars(gpu_manager).values() if isinstance(value, Family))


def _labels(labels: tuple[str, ...]) -> str:
    return ", ".join(map(code, labels))
