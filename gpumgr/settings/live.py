"""Which settings can change under a running agent, and what a reload comes to. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpumgr.settings.schema import Settings, build, sections

#: What takes effect without a restart: decisions, looks and writes to come follow it, nothing that was granted changes. All else is
#: tied to sockets, files, processes or containers that are there already.
LIVE: Final = frozenset(
    {
        "kubernetes.pod_wait_milliseconds",
        "kubernetes.annotate_pods",
        "kubernetes.write_events",
        "kubernetes.describe_node",
        "kubernetes.node_labels",
        "nvml.sample_period_seconds",
        "nvml.ignored_xids",
        "placement.policy",
        "placement.share_mode",
        "enforcement.over_limit_samples",
        "enforcement.over_limit_slack_mebibytes",
        "enforcement.evict",
        "metrics.gpu_manager_names",
        "metrics.hami_names",
        "log.level",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """`settings` are in force from now on: those of before, with what could be applied. The others are dotted keys in the file's
    order: `applied` now, and `needs_restart` for what was written otherwise than what is in force."""

    settings: Settings
    applied: tuple[str, ...]
    needs_restart: tuple[str, ...]


def reload(in_force: Settings, written: Settings) -> Reload:
    """What comes of settings that were read anew while others are in force."""
    old, new = flat(in_force), flat(written)
    changed = [key for key in old if old[key] != new[key]]
    applied = tuple(key for key in changed if key in LIVE)
    return Reload(
        settings=build({**old, **{key: new[key] for key in applied}}),
        applied=applied,
        needs_restart=tuple(key for key in changed if key not in LIVE),
    )


def flat(settings: Settings) -> Mapping[str, object]:
    """Dotted key -> value, in the file's order."""
    return {f"{section}.{key}": getattr(getattr(settings, section), key) for section, keys in sections().items() for key in keys}
