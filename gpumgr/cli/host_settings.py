"""The settings of the agent that runs as a service of a host, as the commands read them that change this host."""

from pathlib import Path
from typing import Final

from gpumgr.cli.host import Host
from gpumgr.settings import Settings, load_settings

CONFIG: Final = Path("/etc/gpumgr/gpumgr.yaml")
#: The unit's EnvironmentFile=.
ENVIRONMENT: Final = Path("/etc/default/gpumgr")
#: Links to the files of the same names in the source tree; the wheel holds their texts.
SHIPPED: Final = Path(__file__).with_name("shipped")


def host_settings(host: Host) -> Settings:
    """The agent's settings, from the existing file (else the one that an installation writes) and its environment.

    Raises InvalidSettingsError.
    """
    own = host.path(CONFIG)
    environ = environment(host.text(ENVIRONMENT) or "")
    return load_settings(own if own.exists() else SHIPPED / CONFIG.name, environ=environ, overrides={})


def environment(text: str) -> dict[str, str]:
    """The variables of the unit's EnvironmentFile=. Source: systemd.exec(5)."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=")[::2] for line in lines if line and not line.startswith(("#", ";")))
    return {name.strip(): _unquoted(value.strip()) for name, value in pairs}


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
