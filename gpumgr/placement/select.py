"""Selects the evaluator of a request, and words the refusal of a request that fits nowhere. Pure.

An evaluator is a rule that chooses GPUs (docs/user-guide.md, "Placement"): "share" chooses a part of one GPU, "fragment" one whole GPU, and
"link" several GPUs. An evaluator leaves no tie open, so the agent and the scheduler choose the same GPUs.
"""

from collections.abc import Collection, Sequence
from typing import Final, Literal

import msgspec

from gpumgr.common.errors import Refusal
from gpumgr.common.units import BLOCK_BYTES, CORE_RESOURCE, CORES_PER_GPU, MEMORY_RESOURCE, count_text
from gpumgr.placement.devices import Topology, score_matrix, set_score
from gpumgr.placement.link import choose_set, has_room
from gpumgr.placement.tree import build_tree, enclosing_group, fragment_choice, mask_of

__all__ = ["Evaluator", "GpuCapacity", "Placement", "Policy", "check_request", "evaluator_for", "find", "place"]

Evaluator = Literal["link", "fragment", "share"]
Policy = Literal["binpack", "spread"]

_LISTED_GPUS: Final = 16


class GpuCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What is free on one GPU for one request. `index`: the GPU's row in the Topology. `entirely_free`: all its cores and blocks are free.
    A GPU with `healthy` False can't be chosen; `note` has the reason ("XID 79"). `label`: its name in refusals, GPU<index> by default."""

    index: int
    cores_free: int
    memory_blocks_free: int
    entirely_free: bool
    healthy: bool = True
    label: str | None = None
    note: str | None = None

    @property
    def name(self) -> str:
        return self.label or f"GPU{self.index}"


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """`gpus` are ascending indices, `score` is the score of the set (link only), `why` a short sentence for the log."""

    evaluator: Evaluator
    gpus: tuple[int, ...]
    score: int | None
    why: str


def evaluator_for(cores: int) -> Evaluator | None:
    if cores < 1:
        return None
    return "share" if cores < CORES_PER_GPU else "fragment" if cores == CORES_PER_GPU else "link"


def check_request(cores: int, memory_blocks: int) -> None:
    """Raises Refusal("invalid_request") for numbers that no node can grant: see docs/user-guide.md, "Requests"."""
    if cores < 0 or memory_blocks < 0:
        raise Refusal("invalid_request", f"{_amounts_text(cores, memory_blocks)} were requested: neither can be less than 0")
    if cores == 0 and memory_blocks == 0:
        raise Refusal("invalid_request", f"nothing was requested: {CORE_RESOURCE} must be 1 or more")
    if cores == 0:
        raise Refusal(
            "invalid_request",
            f"{count_text(memory_blocks, 'memory block')} requested without cores: {MEMORY_RESOURCE} also needs {CORE_RESOURCE}",
        )
    _check_cores(cores)
    if cores < CORES_PER_GPU and memory_blocks == 0:
        raise Refusal(
            "invalid_request",
            f"{count_text(cores, 'core')} requested without memory: a share of a GPU needs {MEMORY_RESOURCE} of 1 or more "
            f"({BLOCK_BYTES >> 20} MiB each) in the same container",
        )


def place(
    topology: Topology,
    gpus: Sequence[GpuCapacity],
    *,
    cores: int,
    memory_blocks: int,
    policy: Policy = "binpack",
    required: Collection[int] = (),
) -> Placement:
    """Chooses GPUs for one container. `required`: indices that the choice must contain. Whole GPUs together must have `memory_blocks`. For
    a share, `memory_blocks` 0 means that the memory is not known yet, because the kubelet asks for cores and memory in two calls. `policy`
    matters only for a share.

    Raises Refusal: "invalid_request"; "gpu_unhealthy" if the request would fit with all GPUs healthy; else "no_fit".
    """
    _check_cores(cores)
    placement = find(topology, gpus, cores=cores, memory_blocks=memory_blocks, policy=policy, required=required)
    if placement is not None:
        return placement
    text = f"{_unmet_text(cores, memory_blocks, frozenset(required), gpus)}; {_free_where(gpus, cores)}"
    raise Refusal("gpu_unhealthy" if _would_fit(gpus, cores, memory_blocks, frozenset(required)) else "no_fit", text)


def find(
    topology: Topology,
    gpus: Sequence[GpuCapacity],
    *,
    cores: int,
    memory_blocks: int,
    policy: Policy = "binpack",
    required: Collection[int] = (),
) -> Placement | None:
    """The choice of `place`, or None if the request fits nowhere. `cores` must be valid."""
    healthy, pinned = [gpu for gpu in gpus if gpu.healthy], frozenset(required)
    if cores < CORES_PER_GPU:
        return _share(healthy, cores, memory_blocks, policy, pinned)
    free = sorted((gpu for gpu in healthy if gpu.entirely_free), key=lambda gpu: gpu.index)
    if not pinned <= {gpu.index for gpu in free}:
        return None
    if cores == CORES_PER_GPU:
        return _fragment(topology, free, memory_blocks, pinned)
    return _link(topology, free, cores // CORES_PER_GPU, memory_blocks, pinned)


def _share(
    gpus: Sequence[GpuCapacity], cores: int, memory_blocks: int, policy: Policy, required: frozenset[int]
) -> Placement | None:
    candidates = [gpu for gpu in gpus if required <= {gpu.index}] if required else gpus
    sign = 1 if policy == "binpack" else -1
    gpu = min(
        [gpu for gpu in candidates if _fits(gpu, cores, memory_blocks)],
        key=lambda gpu: (sign * gpu.cores_free, sign * gpu.memory_blocks_free, gpu.index),
        default=None,
    )
    if gpu is None:
        return None
    order = "least" if policy == "binpack" else "most"
    why = (
        f"the {order} free room that fits: {_free_text(gpu)} were free"
        if len(candidates) > 1
        else "the only GPU that may be taken"
    )
    return Placement(evaluator="share", gpus=(gpu.index,), score=None, why=why)


def _fragment(topology: Topology, free: list[GpuCapacity], memory_blocks: int, required: frozenset[int]) -> Placement | None:
    eligible = [gpu.index for gpu in free if gpu.memory_blocks_free >= memory_blocks and required <= {gpu.index}]
    tree, free_mask = build_tree(topology), mask_of(tuple(gpu.index for gpu in free))
    gpu = fragment_choice(tree, free_mask, mask_of(tuple(eligible)))
    if gpu is None:
        return None
    group = enclosing_group(tree, 1 << gpu)
    left = (group.mask & free_mask).bit_count()
    why = f"in the group that is nearly used up: {group.name} has {left} of the node's {len(free)} free GPUs"
    return Placement(evaluator="fragment", gpus=(gpu,), score=None, why=why)


def _link(
    topology: Topology, free: list[GpuCapacity], count: int, memory_blocks: int, required: frozenset[int]
) -> Placement | None:
    chosen = choose_set(
        topology,
        tuple(gpu.index for gpu in free),
        count,
        tuple(sorted(required)),
        tuple(gpu.memory_blocks_free for gpu in free),
        memory_blocks,
    )
    if chosen is None:
        return None
    score = set_score(score_matrix(topology), chosen)
    group = enclosing_group(build_tree(topology), mask_of(chosen))
    why = (
        f"{count} of {len(free)} free GPUs, for the best links among them and among the GPUs that stay free: within {group.name}, "
        f"score {score}"
    )
    return Placement(evaluator="link", gpus=chosen, score=score, why=why)


def _check_cores(cores: int) -> None:
    if cores < 1:
        raise Refusal("invalid_request", f"{cores} cores requested: {CORE_RESOURCE} must be 1 or more")
    if cores > CORES_PER_GPU and cores % CORES_PER_GPU:
        raise Refusal(
            "invalid_request",
            f"{cores} cores requested: above {CORES_PER_GPU}, {CORE_RESOURCE} must be a multiple of {CORES_PER_GPU} (whole GPUs)",
        )


def _fits(gpu: GpuCapacity, cores: int, memory_blocks: int) -> bool:
    return gpu.cores_free >= cores and gpu.memory_blocks_free >= memory_blocks


def _would_fit(gpus: Sequence[GpuCapacity], cores: int, memory_blocks: int, required: frozenset[int]) -> bool:
    if cores < CORES_PER_GPU:
        return any(required <= {gpu.index} and _fits(gpu, cores, memory_blocks) for gpu in gpus)
    room = {gpu.index: gpu.memory_blocks_free for gpu in gpus if gpu.entirely_free}
    return has_room(room, cores // CORES_PER_GPU, required, memory_blocks)


def _unmet_text(cores: int, memory_blocks: int, required: frozenset[int], gpus: Sequence[GpuCapacity]) -> str:
    count = cores // CORES_PER_GPU
    if cores < CORES_PER_GPU:
        text = f"no GPU has {_amounts_text(cores, memory_blocks)} free"
    elif count == 1:
        text = "no GPU is entirely free" + (f" and has {count_text(memory_blocks, 'memory block')}" if memory_blocks else "")
    else:
        text = f"{count} entirely free GPUs" + (
            f" with {count_text(memory_blocks, 'memory block')} in all" if memory_blocks else ""
        )
        text += f" requested, {sum(gpu.entirely_free and gpu.healthy for gpu in gpus)} of {len(gpus)} are free"
    if required:
        names = {gpu.index: gpu.name for gpu in gpus}
        text += f" ({', '.join(names.get(index, f'GPU{index}') for index in sorted(required))} must be among them)"
    return text


def _free_where(gpus: Sequence[GpuCapacity], cores: int) -> str:
    if not gpus:
        return "there is no GPU to choose from"
    parts = [_described(gpu, cores) for gpu in gpus[:_LISTED_GPUS]]
    more = len(gpus) - len(parts)
    return "free: " + ", ".join(parts) + (f" and {more} more GPUs" if more else "")


def _described(gpu: GpuCapacity, cores: int) -> str:
    if not gpu.healthy:
        return f"{gpu.name} not offered ({gpu.note or 'unhealthy'})"
    if cores >= CORES_PER_GPU and gpu.entirely_free:
        memory = count_text(gpu.memory_blocks_free, "memory block")
        return f"{gpu.name} entirely ({memory}{f'; {gpu.note}' if gpu.note else ''})"
    return f"{gpu.name} {_free_text(gpu)}" + (f" ({gpu.note})" if gpu.note else "")


def _free_text(gpu: GpuCapacity) -> str:
    return _amounts_text(gpu.cores_free, gpu.memory_blocks_free)


def _amounts_text(cores: int, memory_blocks: int) -> str:
    return f"{count_text(cores, 'core')} and {count_text(memory_blocks, 'memory block')}"
