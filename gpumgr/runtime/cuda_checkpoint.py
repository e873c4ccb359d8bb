"""A program that suspends or resumes processes by the driver's checkpoint functions (cuCheckpointProcess*). It imports nothing of gpumgr.

The argument is `suspend` or `resume`. Standard input has one JSON object: `library`, name or path of libcuda; `proc`, the folder of proc;
`lock_file` and `lock`, a file and the name of a lock in it; `work_seconds`, how long a suspension waits for submitted work; `processes`,
pairs of pid and start time; `required`, the pids for which the driver must report a state while they run.

The program prints one JSON object: `pids`: the processes that use CUDA; `held`: the processes that are locked, checkpointed or of unknown
state; `failed`: the processes that can't go on; `error`, with `out_of_memory` if the GPU lacked memory; `untouched`: no process was
changed. The lists leave out processes that have ended. They also leave out processes that do not use CUDA, unless these are required.

Each step depends only on the driver's states, so an interrupted run can be repeated. The lock makes a run wait for an earlier one, which a
killed agent may have left. If a suspension fails for one process, the others are restored and unlocked. If a resume lacks GPU memory for
one, the others are moved to the host again.
"""

import ctypes
import fcntl
import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
#: CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_ILLEGAL_STATE
OUT_OF_MEMORY, ILLEGAL_STATE = 2, 401
_WAIT_SECONDS = 0.1


class _Args(ctypes.Structure):
    """The arguments of any of the functions. Only Lock reads a field."""

    _fields_ = (("timeout_milliseconds", ctypes.c_uint), ("reserved", ctypes.c_uint * 15))


class _CudaError(Exception):
    def __init__(self, function: str, pid: int, code: int) -> None:
        super().__init__(f"{function} of process {pid}: CUDA error {code}")
        self.code = code


class _Processes:
    def __init__(self, request: dict[str, Any]) -> None:
        self._proc, self._milliseconds = Path(request["proc"]), round(request["work_seconds"] * 1000)
        self._started, self._required = {int(pid): int(started) for pid, started in request["processes"]}, request["required"]

    def load(self, library: str) -> None:
        """Raises OSError if the library can't be loaded, _CudaError if CUDA does not start."""
        self._cuda = ctypes.CDLL(library)
        if code := self._cuda.cuInit(0):
            raise _CudaError("cuInit", 0, code)

    def run(self, before: int, function: str, *, stop: bool = False) -> _CudaError | None:
        """Calls the function for all processes in the state `before`; with `stop` until a call fails. Returns the first error."""
        name, first = f"cuCheckpointProcess{function}", None
        for pid in [pid for pid, state in self.states().items() if state == before]:
            arguments = _Args(timeout_milliseconds=self._milliseconds if function == "Lock" else 0)
            # ILLEGAL_STATE: the driver may still be busy with what an earlier run began.
            while (code := getattr(self._cuda, name)(pid, ctypes.byref(arguments))) == ILLEGAL_STATE:
                time.sleep(_WAIT_SECONDS)
                if self.states().get(pid) != before:
                    code = 0
                    break
            if code and self._runs(pid):
                first = first or _CudaError(name, pid, code)
                if stop:
                    break
        return first

    def states(self) -> dict[int, int]:
        found = {}
        for pid in self.running():
            state = ctypes.c_int()
            if self._cuda.cuCheckpointProcessGetState(pid, ctypes.byref(state)) == 0:
                found[pid] = state.value
        return found

    def running(self) -> list[int]:
        return [*filter(self._runs, self._started)]

    def unknown(self) -> list[int]:
        states = self.states()
        return [pid for pid in self._required if pid not in states and self._runs(pid)]

    def _runs(self, pid: int) -> bool:
        try:
            fields = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return False
        return fields[0] not in b"XZ" and int(fields[19]) == self._started[pid]


_LOCK, _CHECKPOINT, _RESTORE, _UNLOCK = (RUNNING, "Lock"), (LOCKED, "Checkpoint"), (CHECKPOINTED, "Restore"), (LOCKED, "Unlock")


def _run(processes: _Processes, verb: str) -> dict[str, object]:
    if verb == "suspend":
        why = f"process {missed[0]} can't be suspended" if (missed := processes.unknown()) else "none of its processes uses CUDA"
        if missed or not processes.states():
            return {"pids": [], "held": missed, "failed": [], "error": why, "untouched": True}
        error = processes.run(*_LOCK, stop=True) or processes.run(*_CHECKPOINT, stop=True)
        if error is not None:
            processes.run(*_RESTORE)
            processes.run(*_UNLOCK)
    else:
        error = processes.run(*_RESTORE)
        if error is not None and error.code == OUT_OF_MEMORY:
            processes.run(*_CHECKPOINT)
        else:
            error = processes.run(*_UNLOCK) or error
    states, missed = processes.states(), processes.unknown()
    held = [pid for pid, state in states.items() if state in (LOCKED, CHECKPOINTED)] + missed
    answer: dict[str, object] = {
        "pids": [*states],
        "held": held,
        "failed": [pid for pid, state in states.items() if state == FAILED],
    }
    if error is None and missed:
        return {**answer, "error": f"the driver does not report the state of process {missed[0]}"}
    return answer if error is None else {**answer, "error": str(error), "out_of_memory": error.code == OUT_OF_MEMORY}


def main(verb: str) -> None:
    request = json.load(sys.stdin)
    processes = _Processes(request)
    with open(request["lock_file"], "ab") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, zlib.crc32(request["lock"].encode()))
        try:
            processes.load(request["library"])
        except (OSError, _CudaError) as error:
            answer = {"pids": [], "held": processes.running(), "failed": [], "error": str(error), "untouched": True}
        else:
            answer = _run(processes, verb)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
