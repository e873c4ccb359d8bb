"""A folder whose path is short enough for unix sockets."""

from tests.component.stage.conftest import folder

__all__ = ["folder"]
