"""The settings that `gpumgr run` would have with the same options; for commands that look at what it runs with."""

import os
from collections.abc import Iterable
from pathlib import Path

from gpumgr.cli.run import DEFAULT_CONFIG
from gpumgr.errors import InputError
from gpumgr.settings import Settings, load_settings


def settings_in_force(file: Path | None, *, standalone: bool, assignments: Iterable[str]) -> Settings:
    """`assignments` are texts such as "http.port=9000". Raises InputError that names every mistake."""
    overrides: dict[str, object] = {}
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
