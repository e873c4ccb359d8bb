"""Which mechanisms a share gets: auto's order, what the operator names, and the operator's exceptions."""

import pytest

from gpumgr.allocator.pods import PodView
from gpumgr.enforcement.mechanism_choice import MechanismChoice, choose_mechanisms, expand, mechanisms_for, override_for

NAMES = ("nvml-memory", "hami-core", "vcuda", "mps", "none")
LIMITS = {
    "nvml-memory": frozenset({"memory"}),
    "hami-core": frozenset({"core", "memory"}),
    "vcuda": frozenset({"core", "memory"}),
    "mps": frozenset({"core", "memory"}),
    "none": frozenset(),
}


def able(*names: str) -> dict[str, str | None]:
    return {name: None if name in (*names, "none") else f"{name} is not here" for name in NAMES}


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ((), ("none",)),
        (("mps",), ("mps",)),
        (("nvml-memory", "mps"), ("nvml-memory", "mps")),
        (("nvml-memory",), ("nvml-memory",)),
        (("hami-core", "mps"), ("hami-core",)),
        (("vcuda",), ("vcuda",)),
        (("nvml-memory", "hami-core", "vcuda", "mps"), ("nvml-memory", "hami-core")),
    ],
)
def test_auto_takes_the_strongest_that_is_there(there: tuple[str, ...], taken: tuple[str, ...]) -> None:
    choice = choose_mechanisms("auto", able(*there))
    assert choice.mechanisms == taken
    assert set(choice.obstacles) == set(NAMES) - set(there) - {"none"}


def test_what_the_operator_names_is_taken_even_if_it_can_not_be_carried() -> None:
    choice = choose_mechanisms("hami-core", able("mps"))
    assert choice.mechanisms == ("hami-core",)
    assert choice.obstacles["hami-core"] == "hami-core is not here"


def test_the_drivers_memory_limits_take_mps_for_the_cores() -> None:
    assert expand("nvml-memory", ["mps"]) == ("nvml-memory", "mps")
    assert expand("nvml-memory", []) == ("nvml-memory",)


def test_the_choice_is_described_with_the_limits_of_each_mechanism() -> None:
    assert MechanismChoice(mechanisms=("nvml-memory", "mps")).describe(LIMITS) == "nvml-memory (memory) + mps (cores)"  # type: ignore[arg-type]
    assert MechanismChoice(mechanisms=("mps",)).describe(LIMITS) == "mps (cores and memory)"  # type: ignore[arg-type]
    assert MechanismChoice().describe(LIMITS) == "none"  # type: ignore[arg-type]


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
    assert mechanisms_for("none", ["mps"], ("mps",)) == ("mps-open",)
    assert mechanisms_for("none", ["mps"], ("nvml-memory", "mps")) == ("mps-open",)
    assert mechanisms_for("none", [], ("hami-core",)) == ("none",)
    assert mechanisms_for("vcuda", ["mps", "vcuda"], ("mps",)) == ("vcuda",)
