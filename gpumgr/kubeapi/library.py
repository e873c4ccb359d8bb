"""Two classes out of kubernetes_asyncio without its thousand modules of generated code (about 30 MiB and 90 ms).

Importing any module of that package runs its `__init__`, which imports every API and model. So its packages are put into
`sys.modules` first, empty but for their paths; the modules that do the work then load alone. If a release of the library is laid out
in another way, the ordinary import takes over: more memory, the same result.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

_ROOT = "kubernetes_asyncio"
_PACKAGES = (_ROOT, f"{_ROOT}.client", f"{_ROOT}.client.models", f"{_ROOT}.config")
#: What the loaded modules themselves import from the package `client`, and where that is defined.
_HOMES = {"ApiClient": "api_client", "Configuration": "configuration"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The parts of kubernetes_asyncio that we use. `slim`: without the generated code."""

    ApiClient: Any
    Configuration: Any
    ConfigException: type[Exception]
    load_incluster_config: Callable[..., None]
    load_kube_config: Callable[..., Any]
    slim: bool


@cache
def load_library() -> Library:
    """Imports the library once, slim if that works."""
    if _ROOT in sys.modules:
        return _collect(slim=False)
    try:
        _place_packages()
        return _collect(slim=True)
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name == _ROOT or name.startswith(_ROOT + ".")]:
            del sys.modules[name]
        return _collect(slim=False)


def _collect(*, slim: bool) -> Library:
    def module(name: str) -> ModuleType:
        return importlib.import_module(f"{_ROOT}.{name}")

    return Library(
        ApiClient=module("client.api_client").ApiClient,
        Configuration=module("client.configuration").Configuration,
        ConfigException=module("config.config_exception").ConfigException,
        load_incluster_config=module("config.incluster_config").load_incluster_config,
        load_kube_config=module("config.kube_config").load_kube_config,
        slim=slim,
    )


def _place_packages() -> None:
    found = importlib.util.find_spec(_ROOT)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"{_ROOT} is not installed")
    base = found.submodule_search_locations[0]
    for name in _PACKAGES:
        spec = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        spec.submodule_search_locations = [base + name.removeprefix(_ROOT).replace(".", "/")]
        package = importlib.util.module_from_spec(spec)
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)
    sys.modules[f"{_ROOT}.client"].__dict__["__getattr__"] = _client_attribute


def _client_attribute(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"{_ROOT}.client.{name} is not loaded in a slim import")
    return getattr(importlib.import_module(f"{_ROOT}.client.{_HOMES[name]}"), name)
