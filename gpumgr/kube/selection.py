"""Reads which GPUs a pod demands from its annotations, gpumgr's and HAMi's. Pure.

If a pod has both annotations for a demand, only gpumgr's counts. An empty text is no constraint, except in nvidia.com/vgpu-mode.

HAMi's scheduler accepts any text, so its annotations are read as HAMi 2.10 reads them (CheckType and CheckUUID in pkg/device/devices.go;
assertNuma and checkType in pkg/device/nvidia/device.go). There are two exceptions: the length is limited, and an empty list is no
constraint, as in HAMi up to 2.9. The texts of gpumgr's annotations are checked.
"""

import re
from collections.abc import Mapping
from typing import Final

from gpumgr.common.errors import Refusal
from gpumgr.placement.requests import MODES, Constraints

USE_MODELS: Final = ("gpumgr.io/use-gpu-model", "nvidia.com/use-gputype")
AVOID_MODELS: Final = ("gpumgr.io/avoid-gpu-model", "nvidia.com/nouse-gputype")
USE_UUIDS: Final = ("gpumgr.io/use-gpu-uuid", "nvidia.com/use-gpuuuid")
AVOID_UUIDS: Final = ("gpumgr.io/avoid-gpu-uuid", "nvidia.com/nouse-gpuuuid")
#: Only HAMi has this annotation. It lists the modes that the pod's GPUs may have.
USE_MODES: Final = "nvidia.com/vgpu-mode"
SAME_NUMA_NODE: Final = ("gpumgr.io/same-numa-node", "nvidia.com/numa-bind")
#: HAMi's policies for the choice of GPUs, separated by commas. `mutex` is a constraint: only GPUs without containers.
GPU_POLICY: Final = "hami.io/gpu-scheduler-policy"

_MAX_NAMES: Final = 64
MAX_CHARACTERS: Final = 96
_UUID: Final = re.compile("GPU-[0-9A-Za-z._-]+")
#: Source: Go's strconv.ParseBool, which HAMi uses, and the empty text.
_TRUE: Final = ("1", "t", "T", "TRUE", "true", "True")
_FALSE: Final = ("", "0", "f", "F", "FALSE", "false", "False")


def constraints_of(annotations: Mapping[str, object]) -> Constraints:
    """Raises Refusal for an unreadable text of gpumgr's annotations, and for too many or too long names."""
    return Constraints(
        use_models=_names(annotations, USE_MODELS),
        avoid_models=_names(annotations, AVOID_MODELS),
        use_uuids=_uuids(annotations, USE_UUIDS),
        avoid_uuids=_uuids(annotations, AVOID_UUIDS),
        same_numa_node=_truth(annotations, SAME_NUMA_NODE),
        unused="mutex" in words(annotations, GPU_POLICY),
        modes=_modes(annotations),
    )


def _modes(annotations: Mapping[str, object]) -> tuple[str, ...] | None:
    """The modes that the text allows; None: any. A text without a mode, such as "", gives (), which no GPU satisfies."""
    modes = tuple(mode for mode in MODES if USE_MODES not in annotations or mode in str(annotations[USE_MODES]))
    return modes if modes != MODES else None


def words(annotations: Mapping[str, object], key: str) -> list[str]:
    return [each.strip() for each in str(annotations.get(key, "")).split(",")]


def _given(annotations: Mapping[str, object], keys: tuple[str, str]) -> tuple[str, str]:
    """The key that counts, and its text."""
    key = next((key for key in keys if key in annotations), keys[0])
    return key, str(annotations.get(key, ""))


def _names(annotations: Mapping[str, object], keys: tuple[str, str]) -> tuple[str, ...]:
    """The names in the text, sorted, because their order has no meaning."""
    key, text = _given(annotations, keys)
    own = key == keys[0]
    names = tuple(sorted({name for each in text.split(",") if (name := each.strip())}))
    if len(names) > _MAX_NAMES or not all(len(name) <= MAX_CHARACTERS and (name.isprintable() or not own) for name in names):
        limits = f"at most {_MAX_NAMES} texts of at most {MAX_CHARACTERS} {'printable ' if own else ''}characters each"
        raise refusal(key, f"{limits}, separated by commas, are supported")
    if own and text.strip() and not names:
        raise refusal(key, f"{text.strip()[:MAX_CHARACTERS]!r} contains no text")
    return names


def _uuids(annotations: Mapping[str, object], keys: tuple[str, str]) -> tuple[str, ...]:
    key, names = _given(annotations, keys)[0], _names(annotations, keys)
    if key == keys[0] and (bad := next((name for name in names if not _UUID.fullmatch(name)), None)):
        raise refusal(key, f"{bad!r} is no UUID of a GPU; `nvidia-smi -L` prints them, for example GPU-5a0ce3bd-...")
    return names


def _truth(annotations: Mapping[str, object], keys: tuple[str, str]) -> bool:
    key, text = _given(annotations, keys)
    if key == keys[0] and (text := text.strip()) not in _TRUE + _FALSE:
        raise refusal(key, f'{text[:MAX_CHARACTERS]!r} is neither "true" nor "false"')
    return text in _TRUE


def refusal(key: str, reason: str) -> Refusal:
    return Refusal("invalid_request", f"annotation {key}: {reason}")
