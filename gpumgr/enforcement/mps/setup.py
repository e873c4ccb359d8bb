"""What all daemons of the node have in common."""

from collections.abc import Callable
from dataclasses import dataclass

from gpumgr.enforcement.mps import launch
from gpumgr.enforcement.mps.commands import Protocol
from gpumgr.enforcement.mps.control import Control
from gpumgr.enforcement.mps.modes import ComputeModes


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """`exclusive`: the GPU is in EXCLUSIVE_PROCESS mode meanwhile. `limit_memory`: MPS keeps it (else the driver does). `clock` is
    monotonic, in seconds.
    """

    protocol: Protocol
    multiuser_option: str | None
    control: Control
    launch: launch.Launch
    modes: ComputeModes
    exclusive: bool
    limit_memory: bool
    clock: Callable[[], float]
