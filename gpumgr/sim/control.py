"""Faults and scripted load of a simulated node, written to its control file while other processes read it.

The file is a set of facts, one per line: a verb, its subject, its value. A fact holds until it is removed. nvml.c, the simulated NVML,
reads the file again when it is replaced. A change replaces the file atomically, under a lock, so several processes may write. Programs that
use the simulated NVML are named callers here.

    generation N           number of times that the driver was unloaded; older NVML sessions are stale
    loaded 0|1             whether the driver is loaded         driver VERSION      its version, if not the node's own
    hang FUNCTION GPU 1    calls wait until the fact is removed; `*` = all functions
    result FUNCTION GPU CODE   result code of calls (GPU -1, here and for `hang`: all calls, also those without a GPU)
    lost GPU 1             mig GPU 0|1      ecc GPU COUNT       recovery GPU ACTION        grow GPU PROCESSES
    memory GPU BYTES       temperature GPU CELSIUS              power GPU MILLIWATTS       utilization GPU PERCENT PERCENT
    process GPU PID BYTES SM_PERCENT [MIG_UUID]    (bytes -1: the driver does not report them)
    mpsserver GPU PID BYTES            mpsclient GPU PID SERVER_PID     (a `process` with the same pid overrides the values)
    migreset GPU 1         a caller's change of the MIG mode waits for a reset of the GPU
    remade GPU 1|2         the GPU's MIG devices are the `instance` facts, not the node's description; 2: a caller changed them
    instance GPU NUMBER UUID GPU_INSTANCE COMPUTE_INSTANCE MEMORY_MIB GPU_SLICES COMPUTE_SLICES PROFILE MEMORY_SLICES
                           (UUID `-`: a GPU instance without compute instance; MEMORY_SLICES: slice n is bit n, 0: not reported)
    event NUMBER GPU TYPE DATA GPU_INSTANCE     (delivered once to each event set that existed before; GPU_INSTANCE 4294967295: none)

The library writes these facts when a caller changes the node through NVML. They are removed when the driver is unloaded. The MIG devices
among them are also removed by a reset of the GPU:

    computemode GPU MODE                memorylimit GPU CGROUP SOFT_BYTES HARD_BYTES
    migmode GPU 0|1                     migpending GPU 0|1 (from the next reset on)        `remade` with 2, and its `instance` facts
"""

import fcntl
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from gpumgr.common.files import replace_file
from gpumgr.placement.devices import MemoryLimit, MigInstance
from gpumgr.sim.nodes import NodeDescription

_EVENT_DOUBLE_BIT_ECC: Final = 0x2
_EVENT_XID: Final = 0x8
_EVENTS_KEPT: Final = 32
_COUNT_BYTES: Final = 8
_NO_INSTANCE: Final = 0xFFFFFFFF
#: The memory of an MPS server (driver 580, H200).
_MPS_SERVER_BYTES: Final = 66 << 20

#: Verb -> how many of the words after it belong to a fact's subject; 1 for other verbs.
_SUBJECT_WORDS: Final = {
    **dict.fromkeys(("generation", "loaded", "driver"), 0),
    **dict.fromkeys(("hang", "result", "process", "mpsserver", "mpsclient", "instance", "memorylimit"), 2),
}
_SET_BY_CALLERS: Final = frozenset({"computemode", "memorylimit", "migmode", "migpending"})
_UNLIMITED: Final = 0xFFFFFFFFFFFFFFFF

Key = tuple[str, ...]
Facts = dict[Key, str]


class SimProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a simulated GPU. `memory_bytes` None: the driver does not report it. `sm_percent`: its utilization of the GPU; 0: no
    sample. `mig_uuid`: the MIG device on which it runs."""

    pid: int
    memory_bytes: int | None = 0
    sm_percent: int = 0
    mig_uuid: str | None = None


class SimControl:
    """Changes one node's control file. `gpu` arguments are NVML indices."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # -- one GPU ---------------------------------------------------------------------------------------------------------

    def lose_gpu(self, gpu: int) -> None:
        self._set(("lost", str(gpu)), "1")

    def restore_gpu(self, gpu: int) -> None:
        """Resets the GPU: ends its loss, volatile errors, recovery action and callers' MIG devices; a pending MIG mode comes into force."""
        with self.changing() as facts:
            made = _made_by_callers(facts)
            _remove(facts, lambda key: key[1:2] == (str(gpu),) and (key[0] in {"lost", "ecc", "recovery"} or key in made))
            if (mode := facts.pop(("migpending", str(gpu)), None)) is not None:
                facts.pop(("mig", str(gpu)), None)
                facts[("migmode", str(gpu))] = mode

    def xid(self, gpu: int, number: int, *, gpu_instance: int = _NO_INSTANCE) -> None:
        self._event(gpu, _EVENT_XID, number, gpu_instance)

    def double_bit_error(self, gpu: int, *, count: int = 1) -> None:
        """An uncorrectable memory error: sets the volatile counter to `count` and sends an event."""
        self._set(("ecc", str(gpu)), str(count))
        self._event(gpu, _EVENT_DOUBLE_BIT_ECC, 0)

    def set_recovery_action(self, gpu: int, action: int) -> None:
        """0 none, 1 GPU reset, 2 reboot, 3 drain P2P, 4 drain and reset."""
        self._set(("recovery", str(gpu)), str(action))

    def set_mig(self, gpu: int, *, enabled: bool) -> None:
        """Replaces the MIG mode that callers have set; they can change it again."""
        with self.changing() as facts:
            _remove(facts, lambda key: key[0] in {"migmode", "migpending"} and key[1:] == (str(gpu),))
            facts["mig", str(gpu)] = str(int(enabled))

    def require_reset_for_mig(self, gpu: int) -> None:
        """From now on, a caller's change of the MIG mode waits for `restore_gpu`."""
        self._set(("migreset", str(gpu)), "1")

    def set_mig_instances(self, gpu: int, instances: Mapping[int, MigInstance]) -> None:
        with self.changing() as facts:
            _remove(facts, lambda key: key[:2] == ("instance", str(gpu)))
            facts[("remade", str(gpu))] = "1"
            for number, instance in instances.items():
                facts[("instance", str(gpu), str(number))] = instance_fact(instance)

    def mig_instances(self, gpu: int) -> Mapping[int, MigInstance]:
        """By NVML's index; empty while the node's description applies. A GPU instance without compute instance has the UUID `-`."""
        found = {}
        for key, value in self._read().items():
            if key[:2] == ("instance", str(gpu)):
                uuid, instance, compute, mebibytes, _, _, profile, slices = value.split()
                found[int(key[2])] = MigInstance(
                    uuid=uuid,
                    profile=profile,
                    gpu_instance=int(instance),
                    compute_instance=int(compute),
                    memory_bytes=int(mebibytes) << 20,
                    memory_slices=int(slices),
                )
        return found

    def set_processes(self, gpu: int, processes: Iterable[SimProcess]) -> None:
        """Replaces the GPU's processes. Their sum is the GPU's used memory, unless `set_memory_used` sets it."""
        with self.changing() as facts:
            _put_processes(facts, gpu, processes)

    def start_mps_server(self, gpu: int, pid: int) -> None:
        """Starts an MPS server, which the driver lists as a compute process, like a real one with clients."""
        self._set(("mpsserver", str(gpu), str(pid)), str(_MPS_SERVER_BYTES))

    def attach_mps_client(self, gpu: int, pid: int, server: int) -> None:
        """Lists the process among the MPS processes; its utilization is reported under the pid `server`."""
        self._set(("mpsclient", str(gpu), str(pid)), str(server))

    def end_mps(self, pid: int) -> None:
        """Ends the MPS server with its clients, or the MPS client, on all GPUs. `process` facts remain."""
        with self.changing() as facts:
            gone = {key for key, value in facts.items() if key[0] == "mpsclient" and value == str(pid)}
            _remove(facts, lambda key: key in gone or (key[0] in {"mpsserver", "mpsclient"} and key[2] == str(pid)))

    def set_memory_used(self, gpu: int, memory_bytes: int) -> None:
        self._set(("memory", str(gpu)), str(memory_bytes))

    def grow_processes(self, gpu: int, extra: int) -> None:
        """Sets how many processes start between the call for the size of the list and the call for the list."""
        self._set(("grow", str(gpu)), str(extra))

    # -- what callers have set -------------------------------------------------------------------------------------------

    def compute_mode(self, gpu: int) -> int:
        """NVML's number: 0 default, 2 prohibited, 3 exclusive process."""
        return int(self._read().get(("computemode", str(gpu)), "0"))

    def set_compute_mode(self, gpu: int, mode: int) -> None:
        self._set(("computemode", str(gpu)), str(mode))

    def memory_limits(self, gpu: int) -> Mapping[str, MemoryLimit]:
        """Limits by full cgroup path. A limit stays when its cgroup is removed."""
        limits: dict[str, MemoryLimit] = {}
        for key, value in self._read().items():
            if key[:2] == ("memorylimit", str(gpu)):
                soft, hard = map(int, value.split())
                limits[key[2]] = MemoryLimit(soft_bytes=soft, hard_bytes=None if hard == _UNLIMITED else hard)
        return limits

    def set_memory_limit(self, gpu: int, cgroup: str, limit: MemoryLimit) -> None:
        hard = _UNLIMITED if limit.hard_bytes is None else limit.hard_bytes
        self._set(("memorylimit", str(gpu), cgroup), f"{limit.soft_bytes} {hard}")

    # -- the driver ------------------------------------------------------------------------------------------------------

    def hang(self, *, function: str = "*", gpu: int | None = None) -> None:
        """Calls wait until `release`. `function`: an NVML function, or `*` for all. `gpu` None: calls for every GPU and calls without a
        GPU."""
        self._set(("hang", function, _gpu(gpu)), "1")

    def release(self) -> None:
        self._drop(lambda key: key[0] == "hang")

    def set_result(self, function: str, code: int, *, gpu: int | None = None) -> None:
        """Sets the result code of calls of this NVML function (`*`: of all functions), for one GPU or all. The code 0 removes it."""
        key = ("result", function, _gpu(gpu))
        if code:
            self._set(key, str(code))
        else:
            self._drop(lambda other: other == key)

    def unload_driver(self) -> None:
        """All calls fail until `load_driver`. Earlier sessions stay stale, and values that callers set are removed."""
        with self.changing() as facts:
            facts[("loaded",)] = "0"
            facts[("generation",)] = str(int(facts.get(("generation",), "0")) + 1)
            made = _made_by_callers(facts)
            _remove(facts, lambda key: key[0] in _SET_BY_CALLERS or key in made)

    def load_driver(self, version: str | None = None) -> None:
        """A changed `version` is a mismatch for processes that loaded the library earlier."""
        with self.changing() as facts:
            facts[("loaded",)] = "1"
            if version is not None:
                facts[("driver",)] = version

    def clear(self) -> None:
        """Removes faults and scripted load. Delivered events, stale sessions and values that callers set remain."""
        with self.changing() as facts:
            made = _made_by_callers(facts)
            _remove(facts, lambda key: key[0] not in {"generation", "event"} | _SET_BY_CALLERS and key not in made)

    # -- the file --------------------------------------------------------------------------------------------------------

    def _event(self, gpu: int, kind: int, data: int, gpu_instance: int = _NO_INSTANCE) -> None:
        with self.changing() as facts:
            numbers = sorted(int(key[1]) for key in facts if key[0] == "event")
            number = (numbers[-1] if numbers else 0) + 1
            facts[("event", str(number))] = f"{gpu} {kind} {data} {gpu_instance}"
            spent = {str(old) for old in numbers[: -_EVENTS_KEPT + 1]}
            _remove(facts, lambda key: key[0] == "event" and key[1] in spent)

    def _set(self, key: Key, value: str) -> None:
        with self.changing() as facts:
            facts[key] = value

    def _drop(self, matches: Callable[[Key], bool]) -> None:
        with self.changing() as facts:
            _remove(facts, matches)

    def _read(self) -> Facts:
        return _parse(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    @contextmanager
    def changing(self) -> Iterator[Facts]:
        """All facts, which the block may change. Only one caller at a time is in a block. The lock file has the number of changes. The
        library maps this file, so it notices a change without a system call."""
        lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            facts = self._read()
            yield facts
            replace_file(self.path, "".join(f"{' '.join(key)} {value}\n" for key, value in facts.items()), durable=False)
            count = int.from_bytes(os.pread(lock, _COUNT_BYTES, 0), sys.byteorder)
            os.pwrite(lock, (count + 1).to_bytes(_COUNT_BYTES, sys.byteorder), 0)
        finally:
            os.close(lock)


def _gpu(gpu: int | None) -> str:
    return "-1" if gpu is None else str(gpu)


def instance_fact(instance: MigInstance) -> str:
    """A MIG device as nvml.c reads it. The slices follow from the profile's name, [Cc.]Gg.SIZEgb."""
    slices = [part[:-1] for part in instance.profile.split(".") if part[:-1].isdigit()]
    ids = f"{instance.gpu_instance} {instance.compute_instance}"
    sizes = f"{instance.memory_bytes >> 20} {slices[-1]} {slices[0]}"
    return f"{instance.uuid} {ids} {sizes} {instance.profile} {instance.memory_slices}"


def _parse(text: str) -> Facts:
    facts: Facts = {}
    for line in text.splitlines():
        words = line.split()
        if words:
            cut = 1 + _SUBJECT_WORDS.get(words[0], 1)
            facts[tuple(words[:cut])] = " ".join(words[cut:])
    return facts


def _put_processes(facts: Facts, gpu: int, processes: Iterable[SimProcess]) -> None:
    _remove(facts, lambda key: key[:2] == ("process", str(gpu)))
    for process in processes:
        memory = -1 if process.memory_bytes is None else process.memory_bytes
        facts[("process", str(gpu), str(process.pid))] = f"{memory} {process.sm_percent} {process.mig_uuid or ''}".rstrip()


def _made_by_callers(facts: Facts) -> set[Key]:
    """Facts about MIG devices of GPUs on which callers have changed them."""
    return {key for key in facts if key[0] in {"remade", "instance"} and facts.get(("remade", key[1])) == "2"}


def _remove(facts: Facts, matches: Callable[[Key], bool]) -> None:
    for key in [key for key in facts if matches(key)]:
        del facts[key]


#: A fully used GPU is this many degrees Celsius warmer than an idle GPU, and needs this many times the power.
_BUSY_CELSIUS: Final = 42
_BUSY_POWER: Final = 10


class SimLoad:
    """Sets processes on GPUs, and the readings that follow from them. `gpu`: NVML index."""

    def __init__(self, control: SimControl, node: NodeDescription) -> None:
        self._control, self._node = control, node
        self._processes: dict[int, dict[int, SimProcess]] = {}

    def put(self, processes: Iterable[tuple[int, SimProcess]]) -> None:
        touched = set[int]()
        for gpu, process in processes:
            self._processes.setdefault(gpu, {})[process.pid] = process
            touched.add(gpu)
        self._write(touched)

    def remove(self, pids: Collection[int]) -> None:
        touched = {gpu for gpu, running in self._processes.items() if not running.keys().isdisjoint(pids)}
        for gpu in touched:
            self._processes[gpu] = {pid: process for pid, process in self._processes[gpu].items() if pid not in pids}
        self._write(touched)

    def _write(self, gpus: Collection[int]) -> None:
        if not gpus:
            return
        with self._control.changing() as facts:
            for gpu in gpus:
                model, processes = self._node.model_of(gpu), self._processes[gpu].values()
                percent = min(100, sum(process.sm_percent for process in processes))
                watts = model.idle_watts * (1 + (_BUSY_POWER - 1) * percent / 100)
                _put_processes(facts, gpu, processes)
                facts["utilization", str(gpu)] = f"{percent} {percent // 2}"
                facts["temperature", str(gpu)] = str(model.idle_celsius + _BUSY_CELSIUS * percent // 100)
                facts["power", str(gpu)] = str(round(1000 * watts))
