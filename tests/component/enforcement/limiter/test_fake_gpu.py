"""The fake GPU's model of time, against what an H200 did without a limiter. Its clock does not depend on the machine's."""

import pytest

from tests.component.enforcement.limiter.harness import Node, gpu_time_percent, started


def _gpu_time_percent(node: Node, works: list[str]) -> list[float]:
    return gpu_time_percent([started(node, None) for _ in works], works, milliseconds=2_000)


@pytest.mark.parametrize("tenants", [1, 2, 3, 8])
def test_contexts_with_work_share_the_time_equally(node: Node, tenants: int) -> None:
    assert _gpu_time_percent(node, ["products"] * tenants) == pytest.approx([100 / tenants] * tenants, abs=1)


def test_a_loop_of_small_kernels_is_bound_by_its_launches(node: Node) -> None:
    assert _gpu_time_percent(node, ["small"]) == pytest.approx([83], abs=1)


@pytest.mark.parametrize("work", ["graph", "long"])
def test_a_tenant_that_is_alone_has_the_whole_gpu(node: Node, work: str) -> None:
    assert _gpu_time_percent(node, [work]) == pytest.approx([100], abs=1)


def test_a_long_kernel_is_interrupted_for_others(node: Node) -> None:
    long, products = _gpu_time_percent(node, ["long", "products"])
    assert products > 35  # its slice also ends when it waits for its own batch
    assert long + products == pytest.approx(100, abs=3)
