"""The mechanisms that a share gets: the node's choice and the operator's overrides. Nothing that a pod's owner can write counts.

`auto` uses the driver's own memory limits where the node has them, and gpumgr's limiter for everything else. The other mechanisms are used
where the operator names them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpumgr.ledger.gpu_limits import GpuLimits, Strengths, describe_limits, gpu_limits
from gpumgr.placement.pods import PodView
from gpumgr.placement.topology.devices import Gpu

Mechanisms = tuple[str, ...]

NO_MECHANISM: Mechanisms = ("none",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismChoice:
    """The mechanisms of this node. `obstacles`: name of another mechanism -> why the node can't use it. `strengths`: the limits of all
    mechanisms."""

    mechanisms: Mechanisms = NO_MECHANISM
    obstacles: Mapping[str, str] = field(default_factory=dict)
    strengths: Strengths = field(default_factory=dict)

    @property
    def able(self) -> Strengths:
        """The mechanisms that the node can use, with their strengths."""
        return {name: limits for name, limits in self.strengths.items() if name not in self.obstacles}

    def limits(self, gpu: Gpu) -> GpuLimits:
        """The limits of new shares on the GPU, without the operator's overrides."""
        return gpu_limits(gpu, self.mechanisms, self.strengths, self.obstacles)

    def describe(self, gpus: Iterable[Gpu]) -> str:
        """The text for the log, the node's annotation and `gpumgr doctor`; without GPUs it names only the mechanisms."""
        return describe_limits((gpu.index, self.limits(gpu)) for gpu in gpus) or "+".join(self.mechanisms)


def choose_mechanisms(setting: str, obstacles: Mapping[str, str | None], strengths: Strengths) -> MechanismChoice:
    """`obstacles`: for each backend, why this node can't use it, or None if it can. A backend that the operator names is chosen even if the
    node can't use it: containers are refused with that reason instead of running without limits."""
    named = {name: obstacle for name, obstacle in obstacles.items() if obstacle is not None}
    node = MechanismChoice(obstacles=named, strengths=strengths)
    return replace(node, mechanisms=expand(setting, node.able))


def expand(setting: str, able: Strengths) -> Mechanisms:
    """The mechanisms for one value of enforcement.backend; a mechanism for memory alone is first. `able`: the mechanisms that the node can
    use."""
    if setting not in ("auto", "nvml-memory"):
        return (setting,)
    memory = ["nvml-memory"] if setting == "nvml-memory" or able.get("nvml-memory") else []
    return (*memory, *(["limiter"] if "limiter" in able else [])) or NO_MECHANISM


def override_for(overrides: Sequence[str], pod: PodView | None) -> tuple[str, str] | None:
    """The override for this pod's service account, else for its namespace, as (subject, value of enforcement.backend); None: none."""
    rules = dict(rule.split("=", 1) for rule in overrides)
    for subject in (pod.account, pod.namespace) if pod is not None else ():
        if subject in rules:
            return subject, rules[subject]
    return None


def mechanisms_for(setting: str, able: Strengths, node: Mechanisms) -> Mechanisms:
    """The mechanisms of a share with an override. On a node with MPS, programs get contexts only through the GPU's daemon, so a container
    without limits uses the daemon without limits."""
    mechanisms = expand(setting, able)
    return ("mps-open",) if mechanisms == NO_MECHANISM and "mps" in node else mechanisms
