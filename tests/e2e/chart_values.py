"""Values that people give the chart: sets that must work, and mistakes with what helm must say of them (tests/data/chart)."""

from collections.abc import Mapping
from typing import Any, Final

import yaml

from tools.chart import agent_container, render

from .manifests import Json
from .places import PROJECT

Values = Mapping[str, Any]

_FOLDER: Final = PROJECT / "tests" / "data" / "chart"
SETS: Final[Mapping[str, Values]] = yaml.safe_load((_FOLDER / "sets.yaml").read_text())
#: Name -> "values" and the "message", with the place of the mistake and what is allowed.
MISTAKES: Final[Mapping[str, Mapping[str, Any]]] = yaml.safe_load((_FOLDER / "mistakes.yaml").read_text())

#: Blocks that the templates look into.
BLOCKS: Final = (
    *("image", "settings", "http", "driver", "mps", "gpuManager", "preflight", "serviceAccount", "rbac", "updateStrategy"),
    *("enforcement", "enforcement.hamiCore"),
    *("probes", "probes.liveness", "metrics", "metrics.service", "metrics.podMonitor", "metrics.serviceMonitor", "metrics.rules"),
)


def mounts_of(values: Values, *flags: str) -> dict[str, Json]:
    """The mounts of the agent's container, by name."""
    return {each["name"]: each for each in agent_container(render(values, *flags))["volumeMounts"]}
