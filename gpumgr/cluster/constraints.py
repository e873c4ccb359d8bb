"""What a pod demands of its GPUs beside their room: models, UUIDs, one NUMA node for the GPUs of a container, no other containers there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpumgr.cluster.node import GpuState, NodeState

_MAX_CHARACTERS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Models are substrings without regard to case, UUIDs are exact. Empty "use": any. `same_numa_node` is about each container that has
    several GPUs. `unused`: GPUs on which no container is yet. `mig` True: only GPUs for MIG devices, False: only GPUs that are shared.

    A GPU without a known model satisfies no constraint on models, one without a known UUID none on UUIDs.
    """

    use_models: tuple[str, ...] = ()
    avoid_models: tuple[str, ...] = ()
    use_uuids: tuple[str, ...] = ()
    avoid_uuids: tuple[str, ...] = ()
    same_numa_node: bool = False
    unused: bool = False
    mig: bool | None = None

    def allowed(self, node: NodeState) -> Sequence[bool]:
        """For each GPU of the node whether the pod may use it. All or none where the node's agent chooses among them."""
        if self.unused and node.naming == "none" and len(node.gpus) > 1:
            return [False] * len(node.gpus)
        if not (self.use_models or self.avoid_models or self.use_uuids or self.avoid_uuids or self.mig is not None):
            return [True] * len(node.gpus)
        each = [self._allows(gpu) for gpu in node.gpus]
        return each if node.naming != "none" or all(each) else [False] * len(each)

    @property
    def uuids(self) -> tuple[str, ...]:
        """GPUs by which the constraints make a node differ from nodes with equal GPUs."""
        return self.use_uuids + self.avoid_uuids

    def numa_nodes(self, node: NodeState, gpus: int) -> Sequence[int] | None:
        """The NUMA nodes on one of which a container with `gpus` GPUs must be; None: anywhere."""
        if not self.same_numa_node or gpus < 2:
            return None
        found = sorted({gpu.numa for gpu in node.gpus})
        return () if node.naming == "none" and len(found) > 1 else [each for each in found if each >= 0]

    @property
    def text(self) -> str:
        """To follow "GPU", for example " of model A100 and not of UUID GPU-1"; empty without constraints on single GPUs."""
        parts = [
            f"{negation}of {each}"
            for negation, models, uuids in (("", self.use_models, self.use_uuids), ("not ", self.avoid_models, self.avoid_uuids))
            for each in (
                f"model {' or '.join(models)}" if models else "",
                f"UUID {uuids[0]}" if len(uuids) == 1 else f"{len(uuids)} UUIDs" if uuids else "",
            )
            if each
        ]
        parts += ["without containers"] if self.unused else []
        parts += [f"in mode {'mig' if self.mig else 'hami-core'}"] if self.mig is not None else []
        text = " and ".join(parts)
        return f" {text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + '...'}" if text else ""

    def _allows(self, gpu: GpuState) -> bool:
        if self.mig not in (None, bool(gpu.mig)):
            return False
        if self.use_models or self.avoid_models:
            model = gpu.model.casefold()
            used = not self.use_models or any(each.casefold() in model for each in self.use_models)
            if not model or not used or any(each.casefold() in model for each in self.avoid_models):
                return False
        if self.use_uuids or self.avoid_uuids:
            return bool(gpu.uuid) and (not self.use_uuids or gpu.uuid in self.use_uuids) and gpu.uuid not in self.avoid_uuids
        return True


UNCONSTRAINED: Final = Constraints()
