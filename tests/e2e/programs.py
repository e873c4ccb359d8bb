"""Small static programs that play a tenant's side of each mechanism, built once for all tests and mounted into the pods."""

import subprocess
from pathlib import Path
from typing import Any

from .manifests import Json
from .places import PROJECT, STATE

SOURCES = PROJECT / "tests" / "data" / "enforcement"
FOLDER = STATE / "programs"


def build() -> Path:
    """Compiles every C file of the test data, statically: the pods' image has no C library. The folder with the programs."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for source in sorted(SOURCES.glob("*.c")):
        program = FOLDER / source.stem
        if not program.exists():
            subprocess.run(["cc", "-static", "-O1", "-Wall", "-o", program, source], check=True)
    return FOLDER


def mounted(container: Json) -> tuple[Json, dict[str, Any]]:
    """The container with the programs in /programs, and the pod's fields for it."""
    mount = {"name": "programs", "mountPath": "/programs", "readOnly": True}
    volumes = [{"name": "programs", "hostPath": {"path": str(FOLDER), "type": "Directory"}}]
    return {**container, "volumeMounts": [*container.get("volumeMounts", []), mount]}, {"volumes": volumes}
