"""The GPUs that the scheduler named for a container (annotation gpumgr.io/placement). Pure.

Such a container gets exactly these GPUs or is refused: its scheduler counts them as used. The annotation is not trusted: it only
restricts the choice, and all rules of the ledger apply.
"""

from gpumgr.common.errors import Refusal
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, GpuName
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.ids import GpuRegistry


def named_gpus(caller: Caller, gpu_registry: GpuRegistry) -> tuple[GpuName, ...]:
    """Empty if the agent chooses. Raises Refusal if the named GPUs do not fit the container's request, or are not on this node."""
    if caller.view is None or caller.spec is None or not caller.view.placed:
        return ()
    spec, shares = caller.spec, dict(caller.view.placed).get(caller.spec.name, ())
    unknown = [uuid for uuid, _ in shares if uuid not in gpu_registry.by_uuid]
    if unknown:
        raise unfollowed(caller, Refusal("unknown_device", f"this node has no GPU {unknown[0]}"))
    if spec.replicas is not None:
        if len(shares) != spec.replicas.count:
            found = f"it names {len(shares)} GPUs, but the container requests {spec.replicas.count}"
            raise unfollowed(caller, Refusal("invalid_request", found))
        return tuple(gpu_registry.by_uuid[uuid].name for uuid, _ in shares)
    cores = sum(amounts.cores for _, amounts in shares)
    memory = sum(amounts.memory_mebibytes for _, amounts in shares)
    wanted = spec.memory_blocks * BLOCK_MEBIBYTES
    # A whole GPU is placed with all its memory, also if the container requests less.
    fits = memory == wanted if spec.cores < CORES_PER_GPU else memory >= wanted
    if len(shares) != max(1, spec.cores // CORES_PER_GPU) or cores != spec.cores or not fits:
        named = f"it names {len(shares)} GPUs with {cores} cores and {memory} MiB"
        found = f"{named}, but the container requests {spec.cores} cores and {wanted} MiB"
        raise unfollowed(caller, Refusal("invalid_request", found))
    return tuple(gpu_registry.by_uuid[uuid].name for uuid, _ in shares)


def unfollowed(caller: Caller, refusal: Refusal) -> Refusal:
    """The refusal with the container and what to do."""
    return Refusal(
        refusal.code,
        f"the scheduler's placement of container {caller.container} can't be followed: {refusal}; the pod must be created again",
    )
