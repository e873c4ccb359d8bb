"""The effective settings: defaults, file, environment and command line together."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gpumgr.errors import InputError
from gpumgr.settings import Settings, load_settings

DEFAULT_CONFIG: Final = Path("/etc/gpumgr/gpumgr.yaml")


def effective_settings(
    file: Path | None, *, standalone: bool, assignments: Iterable[str], flags: Mapping[str, object] = MappingProxyType({})
) -> Settings:
    """`assignments` are texts such as "http.port=9000"; they override `flags`, the values of other options by dotted name.

    Raises InputError, which names every mistake.
    """
    overrides = dict(flags)
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text!r}: expected SECTION.KEY=VALUE, for example http.port=9000")
        overrides[key] = value
    if standalone:
        overrides["kubernetes.enabled"] = False
    if file is None and DEFAULT_CONFIG.exists():
        file = DEFAULT_CONFIG
    return load_settings(file, environ=os.environ, overrides=overrides)
