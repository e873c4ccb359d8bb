"""Loads the function of kubernetes_asyncio that reads kubeconfig files and runs their credential plugins."""

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

_ROOT: Final = "kubernetes_asyncio"
_PACKAGES: Final = (_ROOT, f"{_ROOT}.client", f"{_ROOT}.config")


# An import of any module of the library imports all APIs and models through the packages' `__init__`: over a thousand modules, 30 MiB. The
# library can't avoid that, so this finder gives its packages an empty `__init__` during the import.
class _EmptyPackages(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _PACKAGES else None
        if spec is not None:
            spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == f"{_ROOT}.client":
            # The kubeconfig reader imports these two names. It needs neither, because gpumgr passes it an object to fill.
            module.__dict__.update(Configuration=None, ApiClient=None)


@cache
def kubeconfig_loader() -> Callable[..., Any]:
    """Returns `load_kube_config`; imports the library at the first call."""
    finder = _EmptyPackages()
    sys.meta_path.insert(0, finder)
    try:
        load: Callable[..., Any] = importlib.import_module(f"{_ROOT}.config.kube_config").load_kube_config
        return load
    finally:
        sys.meta_path.remove(finder)
