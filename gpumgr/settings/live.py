"""Settings that can change while the agent runs, and the result of a reload. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpumgr.settings.schema import Settings, build, sections

#: Keys that take effect without a restart: they count for later decisions, samples and writes; existing grants do not change. All other
#: keys concern sockets, files, processes or containers that exist already.
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
    """`settings` are the previous settings with the live keys changed. `applied` and `needs_restart` are the dotted keys that differ, in
    the file's order."""

    settings: Settings
    applied: tuple[str, ...]
    needs_restart: tuple[str, ...]


def reload(current: Settings, written: Settings) -> Reload:
    """Applies the live keys of `written` to `current`."""
    old, new = flat(current), flat(written)
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
