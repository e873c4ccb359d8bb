"""What a reload comes to, and what the settings of HAMi's resources mean."""

from collections.abc import Mapping
from typing import Any

import pytest

from gpumgr.settings import Settings, load_settings
from gpumgr.settings.live import reload
from gpumgr.settings.profile import replica_resources
from gpumgr.settings.schema import flat, is_live, sections

OTHER: Mapping[str, Any] = {
    "kubernetes.pod_wait_milliseconds": 7,
    "kubernetes.node_labels": ["a=b"],
    "nvml.sample_period_seconds": 7.0,
    "nvml.ignored_xids": [7],
    "placement.policy": "spread",
    "enforcement.over_limit_samples": 7,
    "enforcement.over_limit_slack_mebibytes": 7,
    "enforcement.suspend_when_idle_seconds": 7,
    "enforcement.max_growth_cores": 7,
    "enforcement.max_growth_memory_mebibytes": 7,
    "log.level": "debug",
}


def settings(**values: Any) -> Settings:
    return load_settings(
        None, environ={}, overrides={"node.name": "n", **{key.replace("__", "."): values[key] for key in values}}
    )


LIVE = [f"{section}.{key}" for section, keys in sections().items() for key, kind in keys.items() if is_live(kind)]


def test_a_setting_says_itself_whether_it_is_live() -> None:
    assert len(LIVE) == 19
    assert {"placement.policy", "nvml.sample_period_seconds", "log.level"} < set(LIVE) < set(flat(Settings()))


@pytest.mark.parametrize("key", LIVE)
def test_each_live_key_is_applied(key: str) -> None:
    before = settings()
    wanted = OTHER[key] if key in OTHER else not flat(before)[key]
    after = settings(**{key: wanted})
    outcome = reload(before, after)
    assert (outcome.settings, outcome.applied, outcome.needs_restart) == (after, (key,), ())


def test_what_is_not_live_stays_and_is_named_until_it_is_taken_back() -> None:
    before = settings()
    written = settings(http__port=9000, placement__policy="spread", checkpoint__dir="/data")
    outcome = reload(before, written)
    assert outcome.settings == settings(placement__policy="spread")
    assert outcome.applied == ("placement.policy",)
    assert outcome.needs_restart == ("checkpoint.dir", "http.port")
    again = reload(outcome.settings, written)
    assert (again.settings, again.applied, again.needs_restart) == (outcome.settings, (), ("checkpoint.dir", "http.port"))
    back = reload(outcome.settings, before)
    assert (back.applied, back.needs_restart) == (("placement.policy",), ())


def test_the_settings_of_hamis_resources_are_used_where_the_resources_are_offered() -> None:
    changed = {"hami__count_resource": "example.com/gpu", "hami__memory_factor": 256, "hami__device_core_scaling": 2.0}
    hami = settings(node__profile="hami", **changed)
    assert (replica_resources(settings(**changed)), replica_resources(hami)) == (None, hami.hami)
