"""Reads the policies of a pod from its annotations, in gpumgr's and in HAMi's spelling. `gpumgr.kube.selection` reads the constraints."""

import re
from collections.abc import Mapping
from typing import Final, get_args

from gpumgr.cluster.core.request import Policy
from gpumgr.kube.selection import GPU_POLICY, MAX_CHARACTERS, refusal, words

POLICY: Final = "gpumgr.io/policy"
#: HAMi has one policy for GPUs and one for nodes. Sources: HAMi 2.10, pkg/scheduler/policy and Fit in pkg/device/nvidia/device.go.
_NODE_POLICY: Final = "hami.io/node-scheduler-policy"
#: Weights in HAMi's score of a GPU; only checked here. The evaluators have no such score: they compare cores, then memory.
_WEIGHTS: Final = "hami.io/device-scoring-weights"
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)


def policy_of(annotations: Mapping[str, object]) -> Policy | None:
    """None: the setting `scheduler.policy` applies. Raises Refusal."""
    if text := str(annotations.get(POLICY, "")).strip():
        found = next((policy for policy in POLICIES if policy == text), None)
        if found is None:
            raise refusal(POLICY, f"{text[:MAX_CHARACTERS]!r} is no policy; use {', '.join(POLICIES)}")
        return found
    if _WEIGHTS in annotations and not _are_weights(text := str(annotations[_WEIGHTS])):
        raise refusal(_WEIGHTS, f"{text[:MAX_CHARACTERS]!r} does not have the form slot=1,core=1,memory=3, with a number above 0")
    return _gpu_policy(annotations)


def node_policy_of(annotations: Mapping[str, object]) -> Policy | None:
    """The policy among nodes. None: the policy of `policy_of` applies to nodes and GPUs. Any text but spread, also a list, means binpack,
    as in HAMi."""
    if str(annotations.get(POLICY, "")).strip() or _NODE_POLICY not in annotations:
        return None
    return "spread" if annotations[_NODE_POLICY] == "spread" else "binpack"


def _gpu_policy(annotations: Mapping[str, object]) -> Policy | None:
    """A list with topology-aware at any position means topology-aware; otherwise the first of binpack and spread in the list counts. `numa`
    and `mutex` alone are no policy: the evaluators of whole GPUs choose near ones anyway, and `mutex` is a constraint. Any other text, also
    a word with blanks around it, means spread, as in HAMi."""
    if GPU_POLICY not in annotations:
        return None
    text, names = str(annotations[GPU_POLICY]), words(annotations, GPU_POLICY)
    if "topology-aware" in names:
        return "topology"
    orders = names if "," in text else [text]
    if first := next((each for each in orders if each in ("binpack", "spread")), None):
        return "binpack" if first == "binpack" else "spread"
    return None if "numa" in orders or "mutex" in names else "spread"


def _are_weights(text: str) -> bool:
    """Whether HAMi's scheduler would place a pod with this text as weights."""
    pairs = [tuple(word.strip() for word in part.split("=", 1)) for part in text.split(",")]
    numbers = [pair[-1] for pair in pairs]
    named = sorted(pair[0] for pair in pairs) == ["core", "memory", "slot"]
    if not named or not all(re.fullmatch(r"\+?0*[0-9]{1,19}|-0+", each) for each in numbers):
        return False
    return 0 < max(int(each[-19:].lstrip("+-") or 0) for each in numbers) < 1 << 63
