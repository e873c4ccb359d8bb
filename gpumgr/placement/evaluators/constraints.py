"""What a pod demands of its GPUs besides amounts: models, UUIDs, one NUMA node for a container's GPUs, no other containers on them.

The scheduler applies the constraints when it chooses GPUs, the agent before a container gets them.
"""

from typing import Final

import msgspec

_MAX_CHARACTERS: Final = 64
#: HAMi's modes of a GPU: it is shared, or containers get MIG devices of it.
MODES: Final = ("hami-core", "mig")


def device_type(model: str | None) -> str:
    """HAMi's type of a GPU of this model."""
    return model if model and model.startswith("NVIDIA") else f"NVIDIA-{model or 'GPU'}"


class Constraints(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU matches a text in `use_models` or `avoid_models` if the text is, without regard to case, a part of the GPU's model as HAMi
    registers the model: with "NVIDIA-" before it, unless it begins with "NVIDIA". UUIDs are exact. If `use_models` or `use_uuids` is empty,
    any model or UUID is allowed. `same_numa_node` concerns each container with several GPUs. `unused`: only GPUs without containers.
    `modes`: some of MODES; None: any.

    A GPU without a known model satisfies no constraint on models, and a GPU without a known UUID satisfies none on UUIDs.
    """

    use_models: tuple[str, ...] = ()
    avoid_models: tuple[str, ...] = ()
    use_uuids: tuple[str, ...] = ()
    avoid_uuids: tuple[str, ...] = ()
    same_numa_node: bool = False
    unused: bool = False
    modes: tuple[str, ...] | None = None

    @property
    def of_single_gpus(self) -> bool:
        """Whether a GPU's properties (model, UUID, mode) decide if it satisfies the constraints."""
        return bool(self.use_models or self.avoid_models or self.use_uuids or self.avoid_uuids or self.modes is not None)

    @property
    def uuids(self) -> tuple[str, ...]:
        """All UUIDs in the constraints. Because of them, nodes with otherwise equal GPUs can differ."""
        return self.use_uuids + self.avoid_uuids

    @property
    def text(self) -> str:
        """The text after "GPU" in a message, for example " of model A100 and not of UUID GPU-1"; empty without constraints on single
        GPUs."""
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
        parts += [f"in mode {' or '.join(self.modes) or 'unknown'}"] if self.modes is not None else []
        text = "".join(each if each.isprintable() else "?" for each in " and ".join(parts))
        return f" {text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + '...'}" if text else ""

    def allows(self, uuid: str, model: str, *, mig: bool = False) -> bool:
        """Whether a GPU satisfies the constraints on modes, models and UUIDs. `uuid` and `model` are empty if they are not known. `mig`:
        containers get MIG devices of the GPU."""
        if self.modes is not None and MODES[mig] not in self.modes:
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
