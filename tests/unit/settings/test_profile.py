"""What the settings of HAMi's resources mean for the parts that read requests."""

import msgspec

from gpumgr.settings.profile import replica_resources
from gpumgr.settings.schema import HamiSettings, Settings


def test_the_settings_are_used_where_the_resources_are_offered() -> None:
    settings = Settings()
    changed = HamiSettings(count_resource="example.com/gpu", memory_factor=256, device_core_scaling=2.0, disable_core_limit=True)
    hami = msgspec.structs.replace(settings, hami=changed, node=msgspec.structs.replace(settings.node, profile="hami"))
    assert replica_resources(settings) is None
    assert replica_resources(hami) == changed
