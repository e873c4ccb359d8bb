"""The policies of a pod by its annotations, in gpumgr's and in HAMi's spelling. Its constraints: `gpumgr.kubeapi.selection`."""

import re
from collections.abc import Mapping
from typing import Final, get_args

from gpumgr.cluster.request import Policy
from gpumgr.kubeapi.selection import GPU_POLICY, MAX_CHARACTERS, refusal, words

POLICY: Final = "gpumgr.io/policy"
#: HAMi has one policy for GPUs and one for nodes; each may be a list. `numa` orders GPUs by NUMA node there, which the evaluators do
#: by themselves.
_NODE_POLICY: Final = "hami.io/node-scheduler-policy"
_HAMI_VALUES: Final[Mapping[str, Policy]] = {"binpack": "binpack", "spread": "spread", "topology-aware": "topology"}
#: Weights in HAMi's score of a GPU. The evaluators have no such score: they compare cores first, and then memory.
_WEIGHTS: Final = "hami.io/device-scoring-weights"
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)


def policy_of(annotations: Mapping[str, object]) -> Policy | None:
    """None: the setting `scheduler.policy` counts. Raises Refusal."""
    if text := str(annotations.get(POLICY, "")).strip():
        found = next((policy for policy in POLICIES if policy == text), None)
        if found is None:
            raise refusal(POLICY, f"{text[:MAX_CHARACTERS]!r} is no policy; use {', '.join(POLICIES)}")
        return found
    if _WEIGHTS in annotations and not _are_weights(text := str(annotations[_WEIGHTS])):
        raise refusal(_WEIGHTS, f"{text[:MAX_CHARACTERS]!r} has not the form slot=1,core=1,memory=3, with one positive number")
    return _hami_policy(annotations, GPU_POLICY)


def node_policy_of(annotations: Mapping[str, object]) -> Policy | None:
    """The policy among nodes. None: that of `policy_of` counts for nodes and GPUs."""
    return None if str(annotations.get(POLICY, "")).strip() else _hami_policy(annotations, _NODE_POLICY)


def _hami_policy(annotations: Mapping[str, object], key: str) -> Policy | None:
    return next((_HAMI_VALUES[word] for word in words(annotations, key) if word in _HAMI_VALUES), None)


def _are_weights(text: str) -> bool:
    """Whether HAMi's scheduler would place a pod with them."""
    pairs = [tuple(word.strip() for word in part.split("=", 1)) for part in text.split(",")]
    numbers = [pair[-1] for pair in pairs]
    named = sorted(pair[0] for pair in pairs) == ["core", "memory", "slot"]
    return named and all(re.fullmatch(r"\+?[0-9]{1,18}", each) for each in numbers) and any(map(int, numbers))
