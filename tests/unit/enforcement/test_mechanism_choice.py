"""Which mechanisms a share gets: auto's order, what the operator names, and the operator's exceptions."""

from collections.abc import Mapping

import pytest

from gpumgr.common.units import Resource
from gpumgr.enforcement.backend import MechanismChoice, choose_mechanisms, expand, mechanisms_for, override_for
from gpumgr.ledger.gpu_share import GpuLimits, Strength, Strengths
from gpumgr.placement.devices import Gpu
from gpumgr.placement.pods import PodView

SOFT: Mapping[Resource, Strength] = {"core": "soft", "memory": "soft"}
HARD: Mapping[Resource, Strength] = {"core": "hard", "memory": "hard"}
STRENGTHS: Strengths = {
    "nvml-memory": {"memory": "hard"},
    "limiter": SOFT,
    "hami-core": SOFT,
    "vcuda": SOFT,
    "mps": SOFT,
    "none": {},
}


def able(*names: str) -> dict[str, str | None]:
    return {name: None if name in (*names, "none") else f"{name} is not here" for name in STRENGTHS}


def gpu(index: int = 0) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", minor=index, bus_id=None, model="NVIDIA A10", memory_bytes=1 << 30)


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ((), ("none",)),
        (("limiter",), ("limiter",)),
        (("nvml-memory", "limiter"), ("nvml-memory", "limiter")),
        (("nvml-memory",), ("nvml-memory",)),
        # The others are taken where they are named, also if their limits are stronger.
        (("limiter", "hami-core", "vcuda", "mps"), ("limiter",)),
        (("hami-core", "vcuda", "mps"), ("none",)),
    ],
)
def test_auto_takes_the_drivers_memory_limits_and_the_limiter(there: tuple[str, ...], taken: tuple[str, ...]) -> None:
    choice = choose_mechanisms("auto", able(*there), {**STRENGTHS, "mps": HARD})
    assert choice.mechanisms == taken
    assert set(choice.obstacles) == set(STRENGTHS) - set(there) - {"none"}


def test_what_the_operator_names_is_taken_even_if_it_can_not_be_carried_or_another_is_stronger() -> None:
    assert choose_mechanisms("vcuda", able("vcuda", "mps"), {**STRENGTHS, "mps": HARD}).mechanisms == ("vcuda",)
    choice = choose_mechanisms("hami-core", able("mps"), STRENGTHS)
    assert choice.mechanisms == ("hami-core",)
    assert choice.obstacles["hami-core"] == "hami-core is not here"
    assert choice.limits(gpu()) == GpuLimits(cores_by="hami-core", memory_by="hami-core")


def test_the_drivers_memory_limits_take_the_limiter_for_the_cores() -> None:
    assert expand("nvml-memory", {"limiter": SOFT, "mps": SOFT}) == ("nvml-memory", "limiter")
    assert expand("nvml-memory", {"mps": SOFT}) == ("nvml-memory",)


def test_the_choice_is_described_by_gpu_and_without_gpus_by_mechanism() -> None:
    choice = choose_mechanisms("auto", able("nvml-memory", "limiter"), STRENGTHS)
    described = choice.describe([gpu(0), gpu(1)])
    assert described.startswith("GPU 0-1: memory hard (nvml-memory), cores soft (limiter); measured: limiter ")
    assert choice.describe([]) == "nvml-memory+limiter"
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
    assert override_for(rules, None) is None, "an unknown pod"


def test_without_limits_on_a_node_of_mps_goes_through_its_daemon() -> None:
    assert mechanisms_for("none", {"mps": SOFT}, ("mps",)) == ("mps-open",)
    assert mechanisms_for("none", {}, ("hami-core",)) == ("none",)
    assert mechanisms_for("vcuda", {"mps": SOFT, "vcuda": SOFT}, ("mps",)) == ("vcuda",)
