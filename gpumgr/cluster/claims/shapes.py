"""The shape of a vcuda pod (what its containers request), the template's name that encodes the shape, and the template itself. Pure.

The admission policy (config/claims/admission-policies.yaml) writes the same names: for each request the container's place (`c0` is
spec.containers[0], `i1` is spec.initContainers[1]), its cores and its blocks of 256 MiB, as in `vcuda-c0-30-20-c2-200-0`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gpumgr.common.errors import Refusal
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, DRA_DRIVER
from gpumgr.placement.select import check_request

DEVICE_CLASS: Final = DRA_DRIVER
#: The annotation of a claim that contains its template's name.
TEMPLATE_ANNOTATION: Final = "gpumgr.io/claim-template"
MANAGED_BY: Final = ("app.kubernetes.io/managed-by", "gpumgr")
PREFIX: Final = "vcuda-"
#: Limits of Kubernetes: characters of an object's name, requests of a claim, and devices of a claim.
MAX_NAME: Final = 253
MAX_REQUESTS: Final = 32
MAX_DEVICES: Final = 32
#: 256 TiB.
MAX_BLOCKS: Final = 1 << 20

_NUMBER: Final = "(0|[1-9][0-9]{0,6})"
_REQUEST: Final = re.compile(f"-([ci]){_NUMBER}-{_NUMBER}-{_NUMBER}")
#: The alternatives for several whole GPUs, the best first: (name, attribute that all the GPUs have in common).
_TOGETHER: Final = (("island", f"{DRA_DRIVER}/island"), ("numa", "resource.kubernetes.io/numaNode"))


class ShapeRequest(msgspec.Struct, frozen=True, order=True):
    """`place`: the index of the container in spec.initContainers (`init`) or spec.containers. `blocks`: memory blocks of 256 MiB; for whole
    GPUs, the least memory that they must have together."""

    init: bool
    place: int
    cores: int
    blocks: int

    @property
    def name(self) -> str:
        return f"{'i' if self.init else 'c'}{self.place}"

    @property
    def gpus(self) -> int:
        """Whole GPUs; 0: a share of one."""
        return self.cores // CORES_PER_GPU


Shape = tuple[ShapeRequest, ...]


def parse(name: str) -> Shape:
    """The shape that a template's name encodes. Raises ValueError with the reason if it encodes none that can be served."""
    text = name.removeprefix(PREFIX.removesuffix("-"))
    found = list(_REQUEST.finditer(text)) if len(name) <= MAX_NAME else []
    if name == text or not found or "".join(each[0] for each in found) != text:
        raise ValueError(f"it is not {PREFIX}PLACE-CORES-BLOCKS, for example {PREFIX}c0-30-20, of at most {MAX_NAME} characters")
    shape = tuple(ShapeRequest(each[1] == "i", int(each[2]), int(each[3]), int(each[4])) for each in found)
    places = [(each.init, each.place) for each in shape]
    if places != sorted(set(places)):
        raise ValueError("each container must be named once, app containers before init containers, in their order")
    for each in shape:
        try:
            check_request(each.cores, each.blocks)
        except Refusal as error:
            raise ValueError(f"request {each.name}: {error}") from error
        if each.blocks > MAX_BLOCKS:
            raise ValueError(f"request {each.name}: {each.blocks} memory blocks are more than {MAX_BLOCKS}")
    if len(shape) > MAX_REQUESTS or sum(max(1, each.gpus) for each in shape) > MAX_DEVICES:
        raise ValueError(f"a claim has at most {MAX_REQUESTS} requests and {MAX_DEVICES} GPUs")
    return shape


def template(namespace: str, name: str, shape: Shape) -> dict[str, Any]:
    constraints = [
        {"requests": [f"{each.name}/{step}"], "matchAttribute": attribute}
        for each in shape
        if each.gpus > 1
        for step, attribute in _TOGETHER
    ]
    devices: dict[str, Any] = {"requests": [_request(each) for each in shape]}
    if constraints:
        devices["constraints"] = constraints
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"namespace": namespace, "name": name, "labels": dict([MANAGED_BY])},
        "spec": {"metadata": {"annotations": {TEMPLATE_ANNOTATION: name}}, "spec": {"devices": devices}},
    }


def _request(wanted: ShapeRequest) -> Mapping[str, Any]:
    asked: dict[str, Any] = {"deviceClassName": DEVICE_CLASS}
    if not wanted.gpus:
        memory = f"{wanted.blocks * BLOCK_MEBIBYTES}Mi"
        asked["capacity"] = {"requests": {"cores": str(wanted.cores), "memory": memory}}
        return {"name": wanted.name, "exactly": asked}
    # Without amounts a GPU is taken whole.
    asked["count"] = wanted.gpus
    if wanted.blocks:
        least = -(-wanted.blocks // wanted.gpus) * BLOCK_MEBIBYTES
        expression = f'device.capacity["{DRA_DRIVER}"].memory.compareTo(quantity("{least}Mi")) >= 0'
        asked["selectors"] = [{"cel": {"expression": expression}}]
    if wanted.gpus == 1:
        return {"name": wanted.name, "exactly": asked}
    steps: Sequence[str] = (*(step for step, _ in _TOGETHER), "any")
    return {"name": wanted.name, "firstAvailable": [{"name": step, **asked} for step in steps]}
