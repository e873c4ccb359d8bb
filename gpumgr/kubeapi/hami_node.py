"""HAMi's annotations of a node: the registered GPUs, their pair scores, the handshake and the lock. Pure.

Source: HAMi 2.10, pkg/device/devices.go (EncodeNodeDevices, DecodeNodeDevices), pkg/device/nvidia/links.go and pkg/util/nodelock.
Up to HAMi 2.4 the list is CSV; its plugins then report every 30 s that they are there.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from gpumgr.kubeapi.hami_mig import RegisteredProfile, decode_profiles
from gpumgr.topology.scores import Scores

REGISTER: Final = "hami.io/node-nvidia-register"
SCORES: Final = "hami.io/node-nvidia-score"
HANDSHAKE: Final = "hami.io/node-handshake"
#: Its scheduler binds no other pod to the node while this is there.
LOCK: Final = "hami.io/mutex.lock"
#: The only way in which the agent shares GPUs by HAMi's resources.
_MODE: Final = "hami-core"
_INTEGER: Final = re.compile("0|[1-9][0-9]{0,9}")
_BOOLEANS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredGpu:
    """`count`: how many containers may share it. `cores` in percent. An unhealthy GPU gets no new pods. `mig_profiles`: of mode mig."""

    uuid: str
    index: int = 0
    count: int
    memory_mebibytes: int
    cores: int
    model: str
    numa: int = 0
    mode: str = _MODE
    mig_profiles: tuple[RegisteredProfile, ...] = ()
    healthy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLock:
    """`pod`: namespace and name of the pod that is being bound; None: an old scheduler does not write it."""

    since: datetime
    pod: tuple[str, str] | None = None

    def __str__(self) -> str:
        return f"for {'/'.join(self.pod) if self.pod else 'a pod'} since {self.since.isoformat()}"


def encode_lock(lock: NodeLock) -> str:
    """The value of the annotation LOCK: a time of RFC 3339 and the pod."""
    return ",".join((lock.since.isoformat(), *(lock.pod or ())))


def decode_lock(text: str) -> NodeLock:
    """Raises ValueError."""
    time, *pod = text.split(",")
    since = datetime.fromisoformat(time)
    if since.tzinfo is None or len(pod) not in (0, 2) or not all(pod):
        raise ValueError(f"{text[:64]!r} is no time with the namespace and name of a pod")
    return NodeLock(since=since, pod=(pod[0], pod[1]) if pod else None)


def device_type(model: str | None) -> str:
    """HAMi's type of a GPU of this model."""
    return model if model and model.startswith("NVIDIA") else f"NVIDIA-{model or 'GPU'}"


def encode_register(gpus: Iterable[RegisteredGpu]) -> str:
    """JSON without fields that are 0, false or empty."""
    rows = (dict(zip(_FIELDS, _values(gpu), strict=True)) for gpu in gpus)
    return json.dumps([{key: value for key, value in row.items() if value} for row in rows], separators=(",", ":"))


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
    found = json.loads(text) or []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError("it is no list of objects")
    return [_gpu(*(each.get(field, default) for field, default in _FIELDS.items())) for each in found]


def encode_scores(uuids: Sequence[str], scores: Scores) -> str:
    """Of each GPU the score of its links to the others."""
    rows = [
        {"uuid": uuid, "score": {other: row[place] for place, other in enumerate(uuids) if other != uuid}}
        for uuid, row in zip(uuids, scores, strict=True)
    ]
    return json.dumps(rows, separators=(",", ":"))


def reported(now: datetime) -> str:
    """The handshake of a plugin for schedulers up to HAMi 2.4."""
    return f"Reported_{now:%Y-%m-%d %H:%M:%S}"


#: In the order of `_values`, with the values of fields that are omitted.
_FIELDS: Final[dict[str, object]] = {
    "id": "",
    "index": 0,
    "count": 0,
    "devmem": 0,
    "devcore": 0,
    "type": "",
    "numa": 0,
    "mode": "",
    "migProfiles": (),
    "health": False,
}


def _values(gpu: RegisteredGpu) -> tuple[object, ...]:
    profiles = msgspec.to_builtins(gpu.mig_profiles)
    return gpu.uuid, gpu.index, gpu.count, gpu.memory_mebibytes, gpu.cores, gpu.model, gpu.numa, gpu.mode, profiles, gpu.healthy


def _gpu(*values: object) -> RegisteredGpu:
    uuid, index, count, memory, cores, model, numa, mode, profiles, healthy = values
    numbers = dict(zip(("index", "count", "memory_mebibytes", "cores", "numa"), (index, count, memory, cores, numa), strict=True))
    whole = {key: each for key, each in numbers.items() if isinstance(each, int) and not isinstance(each, bool) and each >= 0}
    if not (isinstance(uuid, str) and uuid and isinstance(model, str) and isinstance(mode, str) and isinstance(healthy, bool)):
        raise ValueError(f"{str(values)[:128]} is no GPU with id, type, mode and health")
    if len(whole) < len(numbers):
        raise ValueError(f"GPU {uuid[:64]}: {sorted(numbers.keys() - whole.keys())[0]} is no whole number of 0 or more")
    decoded = decode_profiles(profiles)
    return RegisteredGpu(uuid=uuid, model=model, mode=mode or _MODE, mig_profiles=decoded, healthy=healthy, **whole)


def _from_csv(row: str) -> RegisteredGpu:
    fields = row.split(",")
    if len(fields) not in (7, 9):
        raise ValueError(f"{row[:64]!r} has {len(fields)} fields; a GPU has 7 or 9")
    uuid, count, memory, cores, model, numa, healthy, index, mode = [*fields, "0", _MODE][:9]
    numbers = [int(each) if _INTEGER.fullmatch(each) else None for each in (index, count, memory, cores)]
    place = int(numa) if re.fullmatch("-?[0-9]{1,4}", numa) else None
    return _gpu(uuid, *numbers, model, max(place, 0) if place is not None else None, mode, (), _BOOLEANS.get(healthy))
