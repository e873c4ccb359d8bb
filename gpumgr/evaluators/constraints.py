"""What a pod demands of its GPUs beside their room: models, UUIDs, one NUMA node for the GPUs of a container, no other containers there.

The scheduler obeys it when it chooses, and the agent before a container gets the GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

_MAX_CHARACTERS: Final = 64


class _Gpu(Protocol):
    """`uuid` and `model` are empty, and `numa` is -1, if they are not known. `mig`: what it has for MIG devices on demand."""

    @property
    def uuid(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def numa(self) -> int: ...
    @property
    def mig(self) -> Sequence[object]: ...


class _Node(Protocol):
    """`naming` "none": its agent chooses among the GPUs."""

    @property
    def gpus(self) -> Sequence[_Gpu]: ...
    @property
    def naming(self) -> Literal["uuid", "index", "none"]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Models are substrings without regard to case, of the model as HAMi registers it: with "NVIDIA-" if it begins otherwise. UUIDs are
    exact. Empty "use": any. `same_numa_node` is about each container that has several GPUs. `unused`: GPUs on which no container is yet.
    `mig` True: only GPUs for MIG devices, False: only GPUs that are shared.

    A GPU without a known model satisfies no constraint on models, one without a known UUID none on UUIDs.
    """

    use_models: tuple[str, ...] = ()
    avoid_models: tuple[str, ...] = ()
    use_uuids: tuple[str, ...] = ()
    avoid_uuids: tuple[str, ...] = ()
    same_numa_node: bool = False
    unused: bool = False
    mig: bool | None = None

    def allowed(self, node: _Node) -> Sequence[bool]:
        """For each GPU of the node whether the pod may use it. All or none where the node's agent chooses among them."""
        if self.unused and node.naming == "none" and len(node.gpus) > 1:
            return [False] * len(node.gpus)
        if not (self.use_models or self.avoid_models or self.use_uuids or self.avoid_uuids or self.mig is not None):
            return [True] * len(node.gpus)
        each = [self.allows(gpu.uuid, gpu.model, mig=bool(gpu.mig)) for gpu in node.gpus]
        return each if node.naming != "none" or all(each) else [False] * len(each)

    @property
    def uuids(self) -> tuple[str, ...]:
        """GPUs by which the constraints make a node differ from nodes with equal GPUs."""
        return self.use_uuids + self.avoid_uuids

    def numa_nodes(self, node: _Node, gpus: int) -> Sequence[int] | None:
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

    def allows(self, uuid: str, model: str, *, mig: bool = False) -> bool:
        """Of one GPU; UUID and model are empty if they are not known. `mig`: containers get MIG devices of it."""
        if self.mig not in (None, mig):
            return False
        if self.use_models or self.avoid_models:
            model = model.casefold()
            model = f"nvidia-{model}" if model and not model.startswith("nvidia") else model
            used = not self.use_models or any(each.casefold() in model for each in self.use_models)
            if not model or not used or any(each.casefold() in model for each in self.avoid_models):
                return False
        if self.use_uuids or self.avoid_uuids:
            return bool(uuid) and (not self.use_uuids or uuid in self.use_uuids) and uuid not in self.avoid_uuids
        return True


UNCONSTRAINED: Final = Constraints()
