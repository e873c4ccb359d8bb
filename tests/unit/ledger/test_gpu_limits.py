"""How strongly each GPU's limits are enforced, and the text of it."""

import pytest

from gpumgr.ledger.gpu_share import GpuLimits, Strengths, describe_limits, gpu_limits
from gpumgr.placement.devices import Gpu

from .nodes import gpu_of

STRENGTHS: Strengths = {
    "nvml-memory": {"memory": "hard"},
    "limiter": {"core": "soft", "memory": "soft"},
    "hami-core": {"core": "soft", "memory": "soft"},
    "mps": {"core": "hard", "memory": "soft"},
    "none": {},
}
PAIR = ("nvml-memory", "limiter")
BOTH = GpuLimits(memory="hard", memory_by="nvml-memory", cores="soft", cores_by="limiter")
MPS = GpuLimits(memory="soft", memory_by="mps", cores="hard", cores_by="mps")


def gpu(model: str = "NVIDIA H100 80GB HBM3", *, mig: bool | None = False) -> Gpu:
    return gpu_of(model=model, mig_enabled=mig)


@pytest.mark.parametrize(
    ("where", "mechanisms", "found"),
    [
        pytest.param(gpu(), PAIR, BOTH, id="each its resource, the first counts"),
        pytest.param(gpu(mig=None), PAIR, BOTH, id="a GPU without MIG"),
        pytest.param(gpu(mig=True), PAIR, GpuLimits(memory_by="nvml-memory", cores_by="limiter"), id="MIG"),
        pytest.param(gpu(mig=True), ("mps",), GpuLimits(memory_by="mps", cores_by="mps"), id="MPS with MIG"),
        pytest.param(
            gpu("Tesla P100-PCIE-16GB"), ("mps",), GpuLimits(memory_by="mps", cores_by="mps"), id="MPS on a GPU older than Volta"
        ),
        pytest.param(gpu("Tesla V100-SXM2-32GB"), ("mps",), MPS, id="MPS on Volta"),
        pytest.param(gpu("a new model"), ("mps",), MPS, id="MPS on an unknown model"),
        pytest.param(
            gpu(mig=True),
            ("hami-core",),
            GpuLimits(memory="soft", memory_by="hami-core", cores="soft", cores_by="hami-core"),
            id="a library is independent of the GPU",
        ),
        pytest.param(gpu(), ("nvml-memory",), GpuLimits(memory="hard", memory_by="nvml-memory"), id="memory alone"),
        pytest.param(gpu(), ("none",), GpuLimits(), id="none"),
        pytest.param(gpu(), ("mps-open",), GpuLimits(), id="a mechanism without limits"),
    ],
)
def test_the_limits_of_a_gpu(where: Gpu, mechanisms: tuple[str, ...], found: GpuLimits) -> None:
    assert gpu_limits(where, mechanisms, STRENGTHS, ()) == found


def test_a_mechanism_that_the_node_can_not_use_limits_nothing() -> None:
    found = gpu_limits(gpu(), PAIR, STRENGTHS, {"limiter": "no library"})
    assert found == GpuLimits(memory="hard", memory_by="nvml-memory", cores_by="limiter")
    assert str(found) == "memory hard (nvml-memory), cores none (limiter can't be used)"


def test_equal_gpus_are_described_together() -> None:
    soft = GpuLimits(memory="soft", memory_by="vcuda", cores="soft", cores_by="vcuda")
    text = describe_limits([(0, BOTH), (4, soft), (1, BOTH), (2, BOTH), (5, GpuLimits()), (7, BOTH)])
    described, measured, more = text.partition("; measured: limiter at ")
    assert described == (
        "GPU 0-2,7: memory hard (nvml-memory), cores soft (limiter); GPU 4: memory soft (vcuda), cores soft (vcuda); "
        "GPU 5: memory none, cores none"
    )
    assert measured
    assert "measured" not in more
    assert describe_limits([]) == ""


@pytest.mark.parametrize("limits", [GpuLimits(cores="soft", cores_by="vcuda"), GpuLimits(cores="none", cores_by="mps")])
def test_nothing_is_shown_as_measured_that_was_not_or_that_does_not_apply(limits: GpuLimits) -> None:
    assert "measured" not in describe_limits([(0, limits)])
