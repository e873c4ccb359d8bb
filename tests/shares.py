"""Containers that share GPUs, as enforcement tests write them."""

from typing import Any

from gpumgr.ledger.gpu_share import GpuShare, SharedGpu

UUID = "GPU-0fe1c342-aaaa-bbbb-cccc-0123456789ab"


def shared_gpu(uuid: str = UUID, *, cores: int = 30, memory_bytes: int = 1 << 30, **fields: Any) -> SharedGpu:
    return SharedGpu(name=uuid[4:12], uuid=uuid, cores=cores, memory_bytes=memory_bytes, **fields)


def gpu_share(allocation: str = "a1", *gpus: SharedGpu, **fields: Any) -> GpuShare:
    """By default a share of one GPU."""
    return GpuShare(allocation=allocation, gpus=gpus or (shared_gpu(),), **{"pod": ("team", "p"), "container": "main"} | fields)


#: In the order of their PCI bus ids, which is not that of their UUIDs.
TWO_GPUS = (
    shared_gpu("GPU-22222222", cores=20, memory_bytes=2 << 30, bus_id="0000:18:00.0"),
    shared_gpu("GPU-11111111", cores=70, memory_bytes=1 << 30, bus_id="0000:3b:00.0"),
)
