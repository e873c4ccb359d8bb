"""Which GPUs a pod demands by its annotations, in gpumgr's and in HAMi's spelling. Pure.

Of two annotations with one meaning gpumgr's counts, and the other is not read. An empty text is as good as none.

HAMi's scheduler refuses no text (HAMi 2.4 to 2.10: CheckType, CheckUUID, assertNuma), so pods that it has bound may have any in HAMi's
annotations: they are read as it does. Those of gpumgr are checked.
"""

import re
from collections.abc import Mapping
from typing import Final

from gpumgr.errors import Refusal
from gpumgr.evaluators.constraints import Constraints

USE_MODELS: Final = ("gpumgr.io/use-gpu-model", "nvidia.com/use-gputype")
AVOID_MODELS: Final = ("gpumgr.io/avoid-gpu-model", "nvidia.com/nouse-gputype")
USE_UUIDS: Final = ("gpumgr.io/use-gpu-uuid", "nvidia.com/use-gpuuuid")
AVOID_UUIDS: Final = ("gpumgr.io/avoid-gpu-uuid", "nvidia.com/nouse-gpuuuid")
#: HAMi's only: a text that contains the modes of the GPUs that the pod may have.
MODES: Final = "nvidia.com/vgpu-mode"
SAME_NUMA_NODE: Final = ("gpumgr.io/same-numa-node", "nvidia.com/numa-bind")
#: HAMi's policy for the GPUs of a node, which may be a list. `mutex` is a constraint: GPUs without containers.
GPU_POLICY: Final = "hami.io/gpu-scheduler-policy"

_MAX_NAMES: Final = 64
MAX_CHARACTERS: Final = 96
_UUID: Final = re.compile("GPU-[0-9A-Za-z._-]+")
#: As Go's strconv.ParseBool, which HAMi uses.
_TRUE: Final = ("1", "t", "T", "TRUE", "true", "True")
_FALSE: Final = ("", "0", "f", "F", "FALSE", "false", "False")


def constraints_of(annotations: Mapping[str, object]) -> Constraints:
    """Raises Refusal for a text of gpumgr's annotations that can't be read, for a mode that no GPU has, and for too many names."""
    return Constraints(
        use_models=_names(annotations, USE_MODELS),
        avoid_models=_names(annotations, AVOID_MODELS),
        use_uuids=_uuids(annotations, USE_UUIDS),
        avoid_uuids=_uuids(annotations, AVOID_UUIDS),
        same_numa_node=_truth(annotations, SAME_NUMA_NODE),
        unused="mutex" in words(annotations, GPU_POLICY),
        mig=_mig(annotations),
    )


def _mig(annotations: Mapping[str, object]) -> bool | None:
    text = str(annotations.get(MODES, "")).strip()
    mig, shared = "mig" in text, "hami-core" in text
    if text and not (mig or shared):
        raise refusal(MODES, f"{text[:MAX_CHARACTERS]!r} contains neither hami-core nor mig")
    return mig if mig != shared else None


def words(annotations: Mapping[str, object], key: str) -> list[str]:
    return [each.strip() for each in str(annotations.get(key, "")).split(",")]


def _given(annotations: Mapping[str, object], keys: tuple[str, str]) -> tuple[str, str]:
    """The key that counts, and its text."""
    key = next((key for key in keys if key in annotations), keys[0])
    return key, str(annotations.get(key, "")).strip()


def _names(annotations: Mapping[str, object], keys: tuple[str, str]) -> tuple[str, ...]:
    """Sorted, so that the order in the text makes no difference."""
    key, text = _given(annotations, keys)
    names = tuple(sorted({name for each in text.split(",") if (name := each.strip())}))
    if len(names) > _MAX_NAMES or not all(len(name) <= MAX_CHARACTERS and name.isprintable() for name in names):
        limits = f"at most {_MAX_NAMES} texts of at most {MAX_CHARACTERS} printable characters each"
        raise refusal(key, f"{limits}, separated by commas, are supported")
    if text and not names and key == keys[0]:
        raise refusal(key, f"{text[:MAX_CHARACTERS]!r} contains no text")
    return names


def _uuids(annotations: Mapping[str, object], keys: tuple[str, str]) -> tuple[str, ...]:
    key, names = _given(annotations, keys)[0], _names(annotations, keys)
    if key == keys[0] and (bad := next((name for name in names if not _UUID.fullmatch(name)), None)):
        raise refusal(key, f"{bad!r} is no UUID of a GPU; `nvidia-smi -L` prints them, for example GPU-5a0ce3bd-...")
    return names


def _truth(annotations: Mapping[str, object], keys: tuple[str, str]) -> bool:
    key, text = _given(annotations, keys)
    if text not in _TRUE + _FALSE and key == keys[0]:
        raise refusal(key, f'{text[:MAX_CHARACTERS]!r} is neither "true" nor "false"')
    return text in _TRUE


def refusal(key: str, reason: str) -> Refusal:
    """For an annotation that can't be read."""
    return Refusal("invalid_request", f"annotation {key}: {reason}")
