"""A tenant for tests, and its container."""

from gpumgr.allocator.gpu_share import GpuShare
from gpumgr.usage.containers import Container

ALLOCATION = "d79ef655d5eaf955"

TENANT = GpuShare(
    allocation=ALLOCATION,
    gpu="0fe1c342",
    uuid="GPU-0fe1c342-0000-4000-8000-000000000000",
    bus_id="0000:18:00.0",
    cores=30,
    memory_bytes=10 * 268_435_456,
    pod=("demo", "resnet"),
    pod_uid="2b7e1516-28ae-d2a6-abf7-158809cf4f3c",
    container="main",
)
CONTAINER = Container(id="c0" * 32, pod=("demo", "resnet"), pod_uid=TENANT.pod_uid or "", name="main", pid=4711)
