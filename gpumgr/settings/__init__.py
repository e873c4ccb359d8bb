"""The operator's settings: a YAML file, overridden by environment variables, which are overridden by flags. All are checked before anything
starts."""

from gpumgr.settings.load import InvalidSettingsError, Problem, check_settings, load_settings
from gpumgr.settings.schema import Settings

__all__ = ["InvalidSettingsError", "Problem", "Settings", "check_settings", "load_settings"]
