"""HAMi's annotations of a node: the registered GPUs, their pair scores, the handshake and the lock. Pure.

Source: HAMi 2.10, pkg/device/devices.go (EncodeNodeDevices, DecodeNodeDevices), pkg/device/nvidia/links.go and pkg/util/nodelock.
Up to HAMi 2.4 the list is CSV; its plugins then report every 30 s that they are there.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta, field

from gpumgr.common.foreign_text import UnreadableText, convert
from gpumgr.kube.cluster_annotations import decode_json
from gpumgr.kube.hami_mig import RegisteredProfile
from gpumgr.placement.topology.scores import Scores

REGISTER: Final = "hami.io/node-nvidia-register"
SCORES: Final = "hami.io/node-nvidia-score"
HANDSHAKE: Final = "hami.io/node-handshake"
#: Its scheduler binds no other pod to the node while this is there.
LOCK: Final = "hami.io/mutex.lock"
#: UUIDs, separated by commas, of GPUs that get no new pods. People write it; other texts have no effect.
DEVICE_CORDON: Final = "hami.io/device-cordon"
_Number = Annotated[int, Meta(ge=0)]
#: Fields of the CSV, as the JSON calls them; old plugins lack the last two.
_COLUMNS: Final = ("id", "count", "devmem", "devcore", "type", "numa", "health", "index", "mode")


class RegisteredGpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`count`: how many containers may share it. `cores` in percent. An unhealthy GPU gets no new pods. `mig_profiles`: of mode mig.

    In JSON, fields that are 0, false or empty are left out.
    """

    uuid: Annotated[str, Meta(min_length=1)] = field(name="id")
    index: _Number = 0
    count: _Number = 0
    memory_mebibytes: _Number = field(name="devmem", default=0)
    cores: _Number = field(name="devcore", default=0)
    model: str = field(name="type", default="")
    numa: int = 0
    #: The default has a factory, so that it is written.
    mode: str = field(default_factory=lambda: "hami-core")
    mig_profiles: tuple[RegisteredProfile, ...] = field(name="migProfiles", default=())
    healthy: bool = field(name="health", default=False)


def describe_lock(text: str) -> str:
    """For which pod the node is locked, and since when, from the annotation LOCK: a time of RFC 3339, and namespace and name of the pod,
    which an old scheduler does not write. Raises ValueError."""
    time, *pod = text.split(",")
    since = datetime.fromisoformat(time)
    if since.tzinfo is None or len(pod) not in (0, 2) or not all(pod):
        raise ValueError(f"{text[:64]!r} is no time with the namespace and name of a pod")
    return f"for {'/'.join(pod) or 'a pod'} since {since.isoformat()}"


def encode_register(gpus: Iterable[RegisteredGpu]) -> str:
    return msgspec.json.encode(list(gpus)).decode()


def encode_register_csv(gpus: Iterable[RegisteredGpu]) -> str:
    """For schedulers up to HAMi 2.4. Commas and colons separate, so a model has none."""
    rows = []
    for gpu in gpus:
        model = re.sub("[,:]", "-", gpu.model)
        healthy = str(gpu.healthy).lower()
        rows.append(
            f"{gpu.uuid},{gpu.count},{gpu.memory_mebibytes},{gpu.cores},{model},{gpu.numa},{healthy},{gpu.index},{gpu.mode}:"
        )
    return "".join(rows)


def decode_register(text: str) -> Sequence[RegisteredGpu]:
    """Both forms. Raises ValueError."""
    if not text.startswith("[") and text != "null":
        *rows, rest = text.split(":")
        if rest or not rows:
            raise ValueError(f"{text[:64]!r} does not end with a colon")
        return [_from_csv(row) for row in rows]
    return [] if text == "null" else decode_json(text, list[RegisteredGpu])


def encode_scores(uuids: Sequence[str], scores: Scores) -> str:
    """The scores of each GPU's links to the others."""
    rows = [
        {"uuid": uuid, "score": {other: row[place] for place, other in enumerate(uuids) if other != uuid}}
        for uuid, row in zip(uuids, scores, strict=True)
    ]
    return msgspec.json.encode(rows).decode()


def reported(now: datetime) -> str:
    """The handshake of a plugin for schedulers up to HAMi 2.4."""
    return f"Reported_{now:%Y-%m-%d %H:%M:%S}"


def _from_csv(row: str) -> RegisteredGpu:
    fields = row.split(",")
    if len(fields) not in (7, 9):
        raise ValueError(f"{row[:64]!r} has {len(fields)} fields; a GPU has 7 or 9")
    try:
        return convert(dict(zip(_COLUMNS, fields, strict=False)), RegisteredGpu, strict=False)
    except UnreadableText as error:
        raise ValueError(f"{row[:64]!r}: {error}") from error
