"""Findings of the libraries that run in containers: the backends limiter and hami-core."""

from collections.abc import Sequence
from typing import Final

from gpumgr.agent.ports import Finding, FindingCode
from gpumgr.ledger.gpu_share import GpuShare

#: A container can change many values; a message names at most this number.
_NAMED: Final = 3


def finding(tenant: GpuShare, code: FindingCode, message: str) -> Finding:
    return Finding(allocation=tenant.allocation, code=code, message=message)


def listed(found: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
