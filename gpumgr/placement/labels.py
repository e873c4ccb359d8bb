"""The node's labels that describe its GPUs. If the GPUs are of several models, the labels describe the most frequent one. Pure.

The labels under `nvidia.com/` are some of the labels of NVIDIA's gpu-feature-discovery, with the same meanings.
`gaia.tencent.com/gpu-model` is gpu-manager's label. The compute capability is not read from the driver: a table has it for some models
(source: developer.nvidia.com/cuda-gpus).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from gpumgr.placement.devices import Gpu, NodeSnapshot

MODEL: Final = "gaia.tencent.com/gpu-model"
NVIDIA: Final = "nvidia.com/"
#: Kubernetes' bound for the value of a label.
MAX_VALUE: Final = 63

_CAPABILITIES: Final = {
    (5, 2): "M4 M40 M60",
    (6, 0): "P100",
    (6, 1): "P4 P40",
    (7, 0): "V100 V100S",
    (7, 5): "T4",
    (8, 0): "A30 A100 A800",
    (8, 6): "A2 A10 A10G A16 A40 A4000 A4500 A5000 A5500 A6000",
    (8, 9): "L2 L4 L20 L40 L40S",
    (9, 0): "H20 H100 H200 H800 GH200",
    (10, 0): "B200 GB200",
    (10, 3): "B300 GB300",
}
_CAPABILITY_OF: Final = {model: capability for capability, models in _CAPABILITIES.items() for model in models.split()}
#: Major number -> gpu-feature-discovery's name of the architecture, unless `_OWN_NAMES` has one.
_FAMILIES: Final = {5: "maxwell", 6: "pascal", 7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell"}
_OWN_NAMES: Final = {(7, 5): "turing", (8, 9): "ada-lovelace"}


def gpu_labels(snapshot: NodeSnapshot, *, describe: bool, further: Iterable[str] = ()) -> dict[str, str]:
    """`describe`: include the labels that describe the GPUs. `further`: the operator's "key=value" texts, which take precedence. Exception:
    the value of the label MODEL is always the GPU's model. Without a GPU the label MODEL is left out."""
    models = Counter(gpu.model for gpu in snapshot.gpus)
    # Among equally frequent models, max() takes the one of the GPU with the lowest index.
    gpu = max(snapshot.gpus, key=lambda each: models[each.model], default=None)
    labels = dict(_described(gpu, models[gpu.model], snapshot)) if gpu and describe else {}
    for key, _, value in (text.partition("=") for text in further):
        labels[key] = model_label(gpu.model) if key == MODEL and gpu else "" if key == MODEL else clean(value)
    return {key: value for key, value in labels.items() if value or key != MODEL}


def model_label(model: str | None) -> str:
    """The second word of at least three, as in gpu-manager ("Tesla M40 24GB" gives M40); otherwise the whole model."""
    words = (model or "").split()
    return clean(words[1]) if len(words) > 2 else clean(model or "")


def clean(text: str) -> str:
    """The text as a label's value: only letters, digits and "-_.", no "-_." at the ends, 63 characters at most."""
    kept = "-".join(re.sub(r"[^A-Za-z0-9_.\s-]", "", text).split())
    return kept.lstrip("-_.")[:MAX_VALUE].rstrip("-_.")


def capability_of(model: str | None) -> tuple[int, int] | None:
    """(major, minor); None for a model that is not in the table. "RTX 6000" is not, because several models have that name."""
    words = re.split(r"[\s-]+", model or "")
    return next((_CAPABILITY_OF[word] for word in words if word in _CAPABILITY_OF), None)


def architecture_of(capability: tuple[int, int]) -> str | None:
    """gpu-feature-discovery's name, such as ampere."""
    return _OWN_NAMES.get(capability) or _FAMILIES.get(capability[0])


def _described(gpu: Gpu, count: int, snapshot: NodeSnapshot) -> Iterator[tuple[str, str]]:
    yield f"{NVIDIA}gpu.count", str(count)
    if gpu.memory_bytes is not None:
        yield f"{NVIDIA}gpu.memory", str(gpu.memory_mebibytes)
    if product := clean(gpu.model or ""):
        yield MODEL, model_label(gpu.model)
        yield f"{NVIDIA}gpu.product", product
    if capability := capability_of(gpu.model):
        major, minor = capability
        if architecture := architecture_of(capability):
            yield f"{NVIDIA}gpu.family", architecture
        yield f"{NVIDIA}gpu.compute.major", str(major)
        yield f"{NVIDIA}gpu.compute.minor", str(minor)
    yield from _version("cuda.driver-version", snapshot.driver_version, ("major", "minor", "revision"))
    yield from _version("cuda.runtime-version", snapshot.cuda_version, ("major", "minor"))


def _version(key: str, version: str | None, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if not version or not (full := clean(version)):
        return
    yield f"{NVIDIA}{key}.full", full
    for name, part in zip(names, full.split("."), strict=False):
        if part := clean(part):
            yield f"{NVIDIA}{key}.{name}", part
