"""What an operator can set: one YAML file, the environment over it, flags over that; checked as a whole before anything starts."""

from gpumgr.settings.load import InvalidSettingsError, Problem, check_settings, load_settings
from gpumgr.settings.schema import Settings

__all__ = ["InvalidSettingsError", "Problem", "Settings", "check_settings", "load_settings"]
