"""The mechanisms that a share gets: the node's choice and the operator's overrides. Nothing that a pod's owner can write counts.

`auto` uses the driver's own memory limits where the driver has them. For the rest it uses a library that the operator has configured,
else NVIDIA's Multi-Process Service, else nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpumgr.allocator.pods import PodView
from gpumgr.units import RESOURCES, Resource

Mechanisms = tuple[str, ...]

NO_MECHANISM: Mechanisms = ("none",)
_WORDS: Final[Mapping[Resource, str]] = {"core": "cores", "memory": "memory"}
#: Those that limit cores and memory, in the order in which `auto` tries them.
COMPLETE: Sequence[str] = ("hami-core", "vcuda", "mps")


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismChoice:
    """The mechanisms of this node. `obstacles`: why it can't use the others, by name."""

    mechanisms: Mechanisms = NO_MECHANISM
    obstacles: Mapping[str, str] = field(default_factory=dict)

    def coverage(self, limits: Mapping[str, frozenset[Resource]]) -> tuple[tuple[str, str], ...]:
        """(mechanism, what it limits here); what an earlier one limits is left out. `limits`: what each can limit."""
        result: list[tuple[str, str]] = []
        taken: set[Resource] = set()
        for name in self.mechanisms:
            mine = [kind for kind in RESOURCES if kind in limits.get(name, frozenset()) and kind not in taken]
            taken |= set(mine)
            result.append((name, " and ".join(_WORDS[kind] for kind in mine) or "nothing"))
        return tuple(result)

    def describe(self, limits: Mapping[str, frozenset[Resource]]) -> str:
        """For the log and the node's annotation: "nvml-memory (memory) + mps (cores)"."""
        return " + ".join(name if kept == "nothing" else f"{name} ({kept})" for name, kept in self.coverage(limits))


def choose_mechanisms(setting: str, obstacles: Mapping[str, str | None]) -> MechanismChoice:
    """`obstacles`: for each backend, why this node can't use it, or None if it can. A backend that the operator names is chosen even
    then: containers are refused with that reason instead of running without limits."""
    able = [name for name, obstacle in obstacles.items() if obstacle is None]
    named = {name: obstacle for name, obstacle in obstacles.items() if obstacle is not None}
    return MechanismChoice(mechanisms=expand(setting, able), obstacles=named)


def expand(setting: str, able: Sequence[str]) -> Mechanisms:
    """The mechanisms for one value of enforcement.backend, the one for memory alone first. `able`: those that the node can use."""
    if setting == "nvml-memory":
        return ("nvml-memory", *(["mps"] if "mps" in able else []))
    if setting != "auto":
        return (setting,)
    first = ["nvml-memory"] if "nvml-memory" in able else []
    complete = next((name for name in COMPLETE if name in able), None)
    return tuple(first + ([complete] if complete else [])) or NO_MECHANISM


def override_for(overrides: Sequence[str], pod: PodView | None) -> tuple[str, str] | None:
    """The override for this pod's service account, else for its namespace, as (subject, value of enforcement.backend); None: none."""
    rules = dict(rule.split("=", 1) for rule in overrides)
    for subject in (pod.account, pod.namespace) if pod is not None else ():
        if subject in rules:
            return subject, rules[subject]
    return None


def mechanisms_for(setting: str, able: Sequence[str], node: Mechanisms) -> Mechanisms:
    """The mechanisms of a share with an override. A GPU of MPS gives contexts through its daemon only, so a container without limits
    uses the daemon without limits."""
    mechanisms = expand(setting, able)
    return ("mps-open",) if mechanisms == NO_MECHANISM and "mps" in node else mechanisms
