"""Which mechanisms a share gets: the node's choice, and the operator's exceptions. Nothing that a tenant can write plays a part.

`auto` takes for memory the driver's own limits where it has them. For the rest, an operator who configured a library wants it used;
else NVIDIA's Multi-Process Service; and if there is nothing at all, nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpumgr.allocator.pods import PodView
from gpumgr.units import KINDS, Kind

Mechanisms = tuple[str, ...]

NOTHING: Mechanisms = ("none",)
_WORDS: Final[Mapping[Kind, str]] = {"core": "cores", "memory": "memory"}
#: Those that keep cores as well as memory, in the order in which `auto` tries them.
COMPLETE: Sequence[str] = ("hami-core", "vcuda", "mps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What this node uses. `obstacles`: why it can't carry the others, by name."""

    mechanisms: Mechanisms = NOTHING
    obstacles: Mapping[str, str] = field(default_factory=dict)

    def told(self, limits: Mapping[str, frozenset[Kind]]) -> tuple[tuple[str, str], ...]:
        """(mechanism, what it keeps here): what an earlier one keeps is not told again. `limits`: what each can keep."""
        result: list[tuple[str, str]] = []
        taken: set[Kind] = set()
        for name in self.mechanisms:
            mine = [kind for kind in KINDS if kind in limits.get(name, frozenset()) and kind not in taken]
            taken |= set(mine)
            result.append((name, " and ".join(_WORDS[kind] for kind in mine) or "nothing"))
        return tuple(result)

    def describe(self, limits: Mapping[str, frozenset[Kind]]) -> str:
        """For the log and the node's annotation: "nvml-memory (memory) + mps (cores)"."""
        return " + ".join(name if kept == "nothing" else f"{name} ({kept})" for name, kept in self.told(limits))


def choose(setting: str, obstacles: Mapping[str, str | None]) -> Choice:
    """`obstacles`: for each backend, why this node can't carry it, or None if it can. What the operator names is taken even if it
    can't be carried: containers are then refused with that reason, which is better than running them without limits."""
    able = [name for name, obstacle in obstacles.items() if obstacle is None]
    named = {name: obstacle for name, obstacle in obstacles.items() if obstacle is not None}
    return Choice(mechanisms=expand(setting, able), obstacles=named)


def expand(setting: str, able: Sequence[str]) -> Mechanisms:
    """Mechanisms behind one word of the settings, the one for memory alone first."""
    if setting == "nvml-memory":
        return ("nvml-memory", *(["mps"] if "mps" in able else []))
    if setting != "auto":
        return (setting,)
    first = ["nvml-memory"] if "nvml-memory" in able else []
    complete = next((name for name in COMPLETE if name in able), None)
    return tuple(first + ([complete] if complete else [])) or NOTHING


def exception_for(overrides: Sequence[str], pod: PodView | None) -> tuple[str, str] | None:
    """What the operator chose for this pod's service account, else for its namespace: (for whom, which word); None: nothing."""
    rules = dict(rule.split("=", 1) for rule in overrides)
    for subject in (pod.account, pod.namespace) if pod is not None else ():
        if subject in rules:
            return subject, rules[subject]
    return None


def excepted(word: str, able: Sequence[str], node: Mechanisms) -> Mechanisms:
    """Mechanisms of a share that is to have another one than the node's. On GPUs that MPS holds for itself nobody gets a context past
    it: who is to have no limits goes through its daemon without any."""
    mechanisms = expand(word, able)
    return ("mps-open",) if mechanisms == NOTHING and "mps" in node else mechanisms
