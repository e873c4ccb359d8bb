"""What these tests stand on: a short folder for sockets, a checkpoint opener, simulated driver libraries."""

from tests.component.checkpoint.conftest import open_checkpoint
from tests.component.nvml.conftest import library_cache, opened
from tests.component.nvml.conftest import node as sim_node
from tests.component.stage.conftest import folder

__all__ = ["folder", "library_cache", "open_checkpoint", "opened", "sim_node"]
