"""Which mechanisms a share gets: auto's order, what the operator names, and the operator's exceptions."""

from collections.abc import Mapping

import pytest

from gpumgr.common.units import Resource
from gpumgr.enforcement.mechanism_choice import MechanismChoice, choose_mechanisms, expand, mechanisms_for, override_for
from gpumgr.ledger.gpu_limits import GpuLimits, Strength, Strengths
from gpumgr.ledger.pods import PodView
from gpumgr.placement.topology.devices import Gpu

SOFT: Mapping[Resource, Strength] = {"core": "soft", "memory": "soft"}
HARD: Mapping[Resource, Strength] = {"core": "hard", "memory": "hard"}
MIXED: Mapping[Resource, Strength] = {"core": "hard", "memory": "soft"}
STRENGTHS: Strengths = {"nvml-memory": {"memory": "hard"}, "hami-core": SOFT, "vcuda": SOFT, "mps": SOFT, "none": {}}


def able(*names: str) -> dict[str, str | None]:
    return {name: None if name in (*names, "none") else f"{name} is not here" for name in STRENGTHS}


def gpu(index: int = 0) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", minor=index, bus_id=None, model="NVIDIA A10", memory_bytes=1 << 30)


@pytest.mark.parametrize(
    ("there", "mps", "taken"),
    [
        ((), SOFT, ("none",)),
        (("mps",), SOFT, ("mps",)),
        (("nvml-memory", "mps"), SOFT, ("nvml-memory", "mps")),
        (("nvml-memory",), SOFT, ("nvml-memory",)),
        # HAMi-core limits no cores of matrix products, graphs and copies on an H200.
        (("hami-core", "mps"), SOFT, ("mps",)),
        (("vcuda", "mps"), SOFT, ("mps",)),
        (("hami-core", "mps"), MIXED, ("mps",)),
        (("vcuda", "mps"), HARD, ("mps",)),
        (("vcuda",), SOFT, ("vcuda",)),
        (("vcuda", "hami-core"), SOFT, ("hami-core",)),
        (("nvml-memory", "hami-core", "vcuda", "mps"), SOFT, ("nvml-memory", "mps")),
        (("nvml-memory", "hami-core", "vcuda", "mps"), MIXED, ("nvml-memory", "mps")),
        # Only what is still open counts: the memory is limited already.
        (("nvml-memory", "hami-core", "mps"), {"core": "none", "memory": "hard"}, ("nvml-memory", "hami-core")),
    ],
)
def test_auto_takes_the_strongest_that_is_there(
    there: tuple[str, ...], mps: Mapping[Resource, Strength], taken: tuple[str, ...]
) -> None:
    choice = choose_mechanisms("auto", able(*there), {**STRENGTHS, "mps": mps})
    assert choice.mechanisms == taken
    assert set(choice.obstacles) == set(STRENGTHS) - set(there) - {"none"}


def test_what_the_operator_names_is_taken_even_if_it_can_not_be_carried() -> None:
    choice = choose_mechanisms("hami-core", able("mps"), STRENGTHS)
    assert choice.mechanisms == ("hami-core",)
    assert choice.obstacles["hami-core"] == "hami-core is not here"
    assert choice.limits(gpu()) == GpuLimits(cores_by="hami-core", memory_by="hami-core")


def test_what_the_operator_names_is_taken_even_if_another_is_stronger() -> None:
    assert choose_mechanisms("vcuda", able("vcuda", "mps"), {**STRENGTHS, "mps": HARD}).mechanisms == ("vcuda",)


def test_the_drivers_memory_limits_take_mps_for_the_cores() -> None:
    assert expand("nvml-memory", {"mps": SOFT}) == ("nvml-memory", "mps")
    assert expand("nvml-memory", {}) == ("nvml-memory",)


def test_the_choice_is_described_by_gpu_and_without_gpus_by_mechanism() -> None:
    choice = choose_mechanisms("auto", able("nvml-memory", "mps"), STRENGTHS)
    assert choice.describe([gpu(0), gpu(1)]).startswith("GPU 0-1: memory hard (nvml-memory), cores soft (mps); measured: mps ")
    assert choice.describe([]) == "nvml-memory+mps"
    assert MechanismChoice().describe([gpu()]) == "GPU 0: memory none, cores none"


@pytest.mark.parametrize(
    ("namespace", "account", "exception"),
    [
        ("batch", None, ("batch", "none")),
        ("batch", "trainer", ("batch/trainer", "vcuda")),
        ("batch", "other", ("batch", "none")),
        ("legacy", "default", ("legacy/default", "hami-core")),
        ("legacy", None, ("legacy/default", "hami-core")),
        ("legacy", "other", None),
        ("elsewhere", None, None),
    ],
)
def test_the_most_exact_exception_counts(namespace: str, account: str | None, exception: tuple[str, str] | None) -> None:
    rules = ("batch=none", "batch/trainer=vcuda", "legacy/default=hami-core")
    assert override_for(rules, PodView(namespace=namespace, name="p", uid="u", service_account=account)) == exception


def test_an_unknown_pod_is_no_exception() -> None:
    assert override_for(("batch=none",), None) is None


def test_without_limits_on_a_node_of_mps_goes_through_its_daemon() -> None:
    assert mechanisms_for("none", {"mps": SOFT}, ("mps",)) == ("mps-open",)
    assert mechanisms_for("none", {"mps": SOFT}, ("nvml-memory", "mps")) == ("mps-open",)
    assert mechanisms_for("none", {}, ("hami-core",)) == ("none",)
    assert mechanisms_for("vcuda", {"mps": SOFT, "vcuda": SOFT}, ("mps",)) == ("vcuda",)
