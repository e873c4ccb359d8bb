"""What an operator does with one GPU: cordon, drain, uncordon, reset."""

from dataclasses import dataclass
from typing import Literal

Action = Literal["cordon", "drain", "uncordon", "reset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`gpu` is what people call a GPU: its index ("3", "GPU3"), the beginning of its UUID, or its name in device ids. `evict`: a drain
    evicts the pods that block it. `reason` is the operator's, for everybody to read."""

    action: Action
    gpu: str
    reason: str = ""
    evict: bool = False
