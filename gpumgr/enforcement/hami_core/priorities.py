"""Priorities of containers on one GPU: launches of one wait while a container of a lower number launches. Pure.

Source: HAMi 2.10, cmd/vGPUmonitor/feedback.go, and HAMi-core's rate_limiter. The library sets the region's word `recent_kernel` at each
launch, and delays launches while the word is below 0; both only in containers with a limit of cores.
"""

from collections.abc import Mapping
from typing import Final

from gpumgr.enforcement.hami_core.seed import RECENT_KERNEL
from gpumgr.ledger.gpu_share import GpuShare

_BLOCKED: Final = -1


def due(found: Mapping[GpuShare, int]) -> dict[GpuShare, int]:
    """The words to write once a second, of the containers that run, by the words that were found. A launch counts for two passes. The
    priorities are those of the pods, and no container can write a word that counts longer."""
    aged = {share: min(word, RECENT_KERNEL) - 1 if word > 0 else word for share, word in found.items()}
    if len({share.priority for share in found}) < 2:
        return {share: 0 for share, word in found.items() if word < 0}
    active = [share for share, word in aged.items() if word > 0]
    wanted = {
        share: _BLOCKED if any(each.priority < share.priority and _meet(each, share) for each in active) else max(word, 0)
        for share, word in aged.items()
    }
    return {share: word for share, word in wanted.items() if word != found[share]}


def _meet(one: GpuShare, other: GpuShare) -> bool:
    return not {gpu.uuid for gpu in one.gpus}.isdisjoint(gpu.uuid for gpu in other.gpus)
