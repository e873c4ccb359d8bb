"""The settings that the agent runs with: of `gpumgr run`, and of commands that look at what it would run with."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gpumgr.errors import InputError
from gpumgr.settings import Settings, load_settings

DEFAULT_CONFIG: Final = Path("/etc/gpumgr/gpumgr.yaml")


def settings_in_force(
    file: Path | None, *, standalone: bool, assignments: Iterable[str], flags: Mapping[str, object] = MappingProxyType({})
) -> Settings:
    """`assignments` are texts such as "http.port=9000"; they go over `flags`, values of other options under the same dotted names.

    Raises InputError that names every mistake.
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
