"""Labels of the node: gpu-manager's model, gpu-feature-discovery's common subset, and what Kubernetes takes as a value."""

import pytest
from msgspec.structs import replace

from gpumgr.placement.devices import NodeSnapshot
from gpumgr.placement.labels import MODEL, capability_of, clean, gpu_labels, model_label
from gpumgr.sim.apiserver_objects import problem_of
from tests.unit.web.metrics.pictures import snapshot_of


def snapshot(*models: str | None, memory_bytes: int = 80 << 30) -> NodeSnapshot:
    made = snapshot_of(len(models))
    gpus = [replace(gpu, model=model, memory_bytes=memory_bytes) for gpu, model in zip(made.gpus, models, strict=True)]
    return replace(made, gpus=tuple(gpus))


def test_all_labels_of_a_node() -> None:
    assert gpu_labels(snapshot("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"), describe=True) == {
        "gaia.tencent.com/gpu-model": "H100",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.count": "2",
        "nvidia.com/gpu.memory": "81920",
        "nvidia.com/gpu.family": "hopper",
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/cuda.driver-version.full": "550.54.15",
        "nvidia.com/cuda.driver-version.major": "550",
        "nvidia.com/cuda.driver-version.minor": "54",
        "nvidia.com/cuda.driver-version.revision": "15",
        "nvidia.com/cuda.runtime-version.full": "12.4",
        "nvidia.com/cuda.runtime-version.major": "12",
        "nvidia.com/cuda.runtime-version.minor": "4",
    }


#: The first four are gpu-manager's own results; where it has none (two words), ours is the whole name.
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Tesla M40 24GB", "M40"),
        ("NVIDIA GeForce RTX 3090", "GeForce"),
        ("GeForce RTX 2080 Ti", "RTX"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla V100-SXM2-16GB", "Tesla-V100-SXM2-16GB"),
        ("Tesla T4", "Tesla-T4"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA-A100-SXM4-80GB"),
        ("NVIDIA H200", "NVIDIA-H200"),
        (None, ""),
    ],
)
def test_the_model_as_gpu_manager_names_it(name: str | None, model: str) -> None:
    assert model_label(name) == model
    assert gpu_labels(snapshot(name), describe=True).get(MODEL, "") == model


@pytest.mark.parametrize(
    ("model", "capability", "family"),
    [
        ("Tesla P40", (6, 1), "pascal"),
        ("Tesla V100-SXM2-16GB", (7, 0), "volta"),
        ("Tesla T4", (7, 5), "turing"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "ampere"),
        ("NVIDIA A10", (8, 6), "ampere"),
        ("NVIDIA RTX A6000", (8, 6), "ampere"),
        ("NVIDIA L40S", (8, 9), "ada-lovelace"),
        ("NVIDIA GH200 480GB", (9, 0), "hopper"),
        ("NVIDIA B200", (10, 0), "blackwell"),
        ("NVIDIA RTX 6000 Ada Generation", None, None),
        ("Quadro RTX 6000", None, None),
        ("NVIDIA GeForce RTX 3090", None, None),
        ("NVIDIA A1000", None, None),
        (None, None, None),
    ],
)
def test_families_of_models_with_an_unambiguous_name(
    model: str | None, capability: tuple[int, int] | None, family: str | None
) -> None:
    assert capability_of(model) == capability
    labels = gpu_labels(snapshot(model), describe=True)
    assert labels.get("nvidia.com/gpu.family") == family
    assert ("nvidia.com/gpu.compute.major" in labels) == (capability is not None)


def test_of_different_gpus_the_most_frequent_model_is_the_label() -> None:
    labels = gpu_labels(snapshot("Tesla T4", "NVIDIA A10", "NVIDIA A10"), describe=True)
    assert (labels["nvidia.com/gpu.product"], labels["nvidia.com/gpu.count"]) == ("NVIDIA-A10", "2")
    labels = gpu_labels(snapshot("Tesla T4", "NVIDIA A10"), describe=True)
    assert (labels["nvidia.com/gpu.product"], labels["nvidia.com/gpu.count"]) == ("Tesla-T4", "1")


def test_the_operators_labels_count_more_and_the_models_value_is_found_out() -> None:
    further = ("zone=a", f"{MODEL}=ignored", "nvidia.com/gpu.count=7", "empty=")
    assert gpu_labels(snapshot("Tesla M40 24GB"), describe=False, further=further) == {
        "zone": "a",
        MODEL: "M40",
        "nvidia.com/gpu.count": "7",
        "empty": "",
    }
    assert gpu_labels(snapshot("Tesla M40 24GB"), describe=True, further=further)["nvidia.com/gpu.count"] == "7"


def test_a_node_without_gpus_has_the_operators_labels_only() -> None:
    assert gpu_labels(snapshot(), describe=True, further=("zone=a", f"{MODEL}=")) == {"zone": "a"}


def test_a_driver_with_few_values_gives_few_labels() -> None:
    silent = replace(snapshot(None), driver_version="610.12", cuda_version=None)
    assert gpu_labels(silent, describe=True) == {
        "nvidia.com/gpu.count": "1",
        "nvidia.com/gpu.memory": "81920",
        "nvidia.com/cuda.driver-version.full": "610.12",
        "nvidia.com/cuda.driver-version.major": "610",
        "nvidia.com/cuda.driver-version.minor": "12",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("NVIDIA  A10 (engineering\nsample)/2", "NVIDIA-A10-engineering-sample2"),
        ("x" * 62 + "-y", "x" * 62),
        ("-._a_.-", "a"),
        ("ü\ud800\x00", ""),
    ],
)
def test_values_are_cleaned_and_cut(text: str, value: str) -> None:
    assert clean(text) == value


@pytest.mark.parametrize("model", ["x" * 253, '"quoted" \n (name) ' * 9, "ä" * 70, "- - -", "a " * 60])
def test_all_labels_are_valid_for_any_value_of_the_driver(model: str) -> None:
    hostile = replace(snapshot(model), driver_version=model, cuda_version="..-")
    assert problem_of({"labels": gpu_labels(hostile, describe=True)}) is None
