"""A tenant for tests, and its container."""

from gpumgr.ledger.node_use import Container
from tests.shares import gpu_share, shared_gpu

ALLOCATION = "d79ef655d5eaf955"

GPU = shared_gpu(bus_id="0000:18:00.0", memory_bytes=10 * 268_435_456)
TENANT = gpu_share(ALLOCATION, GPU, pod=("demo", "resnet"), pod_uid="2b7e1516-28ae-d2a6-abf7-158809cf4f3c")
CONTAINER = Container(id="c0" * 32, pod=("demo", "resnet"), pod_uid=TENANT.pod_uid or "", name="main", pid=4711)
