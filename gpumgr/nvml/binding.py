"""The door to the NVIDIA binding: the only module that imports pynvml.

It loads the library, calls functions by name, and turns what comes back into our words: errors of the binding become the errors
below, bytes become text, capabilities that this driver lacks become None. All of it is synchronous; the worker's thread calls it.
"""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

import pynvml

from gpumgr.errors import NvmlAbsent, NvmlError

# NVML's return codes (nvmlReturn_t) that we act upon.
SUCCESS: Final = 0
UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
INSUFFICIENT_SIZE: Final = 7
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
ARGUMENT_VERSION_MISMATCH: Final = 25
DEPRECATED: Final = 26

#: This driver, this GPU or this user can't do that: an answer is unknown, nothing is wrong.
_CAPABILITY: Final = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED})
#: The driver as a whole is gone.
_DOWN: Final = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND})
#: Codes by which a function answers "none so far": nothing went wrong. (The binding raises even success where it finds no list.)
_NONE_YET: Final = frozenset(
    {("nvmlDeviceGetProcessUtilization", SUCCESS), ("nvmlDeviceGetProcessUtilization", NOT_FOUND), ("nvmlEventSetWait", TIMEOUT)}
)

MEMORY_V2: Final = 0x02000028
EVENT_DOUBLE_BIT_ECC: Final = 0x2
EVENT_XID: Final = 0x8
FIELD_RECOVERY_ACTION: Final = 230

_SYSTEM_NAME: Final = "libnvidia-ml.so.1"

Handle = Any
T = TypeVar("T")


class CallError(NvmlError):
    """An NVML function answered with an error about its subject (a GPU, a link). `gpu` is the GPU's UUID where it is known."""

    def __init__(self, function: str, code: int, text: str, gpu: str | None = None) -> None:
        super().__init__(f"{function}{f' of {gpu}' if gpu else ''}: {text} (NVML error {code})")
        self.function, self.code, self.text = function, code, text


class DriverDown(NvmlAbsent):
    """The driver is not loaded (any more), or was loaded anew: NVML must be initialised again."""


class DriverMismatchError(NvmlError):
    """The kernel's driver is not the one that the loaded library belongs to. The library can't be loaded anew in a process."""


class Binding:
    """One NVML library, loaded from `path` or found by the system's loader.

    The binding keeps one library for the whole process, so one Binding is in use at a time: `open` takes over.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._begun = 0
        #: How often a function went wrong, by its name and NVML's error number. Grows for ever.
        self.errors: Counter[tuple[str, int]] = Counter()

    def open(self) -> None:
        """Loads the library if need be and initialises NVML. Raises NvmlAbsent, DriverMismatchError or CallError."""
        self._load()
        try:
            self.call("nvmlInit")
        except CallError as exc:
            if exc.code != FUNCTION_NOT_FOUND:
                raise
            self._init_of_old()
        self._begun += 1

    def close(self) -> None:
        """Shuts NVML down; a driver that is gone has nothing to shut down.

        NVML counts: one left from before (a hang kept us from ending it) would keep the GPUs open as long as this process lives.
        """
        begun, self._begun = self._begun, 0
        with contextlib.suppress(DriverDown):
            for _ in range(begun):
                self.call("nvmlShutdown")

    def call(self, function: str, *arguments: Any) -> Any:
        """The binding's answer. Raises CallError, or DriverDown or DriverMismatchError where that is what the code means."""
        known = getattr(pynvml, function, None)
        if known is None:  # a binding older or newer than we expect
            raise CallError(function, FUNCTION_NOT_FOUND, "unknown to the NVML binding")
        try:
            answer = known(*arguments)
        except pynvml.NVMLError as exc:
            raise self._translated(function, exc) from exc
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def ask(self, function: str, *arguments: Any) -> Any | None:
        """Like `call`, but None where this driver, GPU or user can't do that."""
        try:
            return self.call(function, *arguments)
        except CallError as exc:
            if self.is_capability(exc):
                return None
            raise

    def invoke(self, function: str, *arguments: Any) -> None:
        """Like `call`, with C's own arguments, past the binding: for functions that it has only in newer versions than we need."""
        try:
            pynvml._nvmlCheckReturn(pynvml._nvmlGetFunctionPointer(function)(*arguments))
        except pynvml.NVMLError as exc:
            raise self._translated(function, exc) from exc

    def on_gpu(self, uuid: str, fn: Callable[[Handle], T]) -> T:
        """What `fn` makes of this GPU's handle. A CallError names the GPU."""
        try:
            return fn(self.call("nvmlDeviceGetHandleByUUID", uuid))
        except CallError as exc:
            raise CallError(exc.function, exc.code, exc.text, uuid) from exc

    def is_capability(self, error: CallError) -> bool:
        """Whether the error says "can't" rather than "went wrong"."""
        return error.code in _CAPABILITY

    def address(self, handle: Handle) -> int | None:
        """What two handles of one GPU have in common."""
        return ctypes.cast(handle, ctypes.c_void_p).value

    def _translated(self, function: str, error: Any) -> NvmlError:
        # The binding's errors are unhashable and compare badly: nothing but their value is looked at.
        code = int(error.value)
        if code not in _CAPABILITY and (function, code) not in _NONE_YET:
            self.errors[function, code] += 1
        if code == LIBRARY_NOT_FOUND:
            return NvmlAbsent("libnvidia-ml.so.1 is not found: the NVIDIA driver is not installed")
        if code in _DOWN:
            return DriverDown(f"the NVIDIA driver is not loaded ({function}: NVML error {code})")
        if code == LIB_RM_VERSION_MISMATCH:
            return DriverMismatchError(
                "the NVIDIA driver was replaced by another version than this process loaded the library of"
            )
        return CallError(function, code, str(error))

    def _load(self) -> None:
        """Points the binding to our library. Its handle and its cache of functions outlast NVML's shutdown, so both are set."""
        if self._path is None:
            if pynvml.nvmlLib is not None and pynvml.nvmlLib._name != _SYSTEM_NAME:
                _use(None)  # what an earlier Binding had loaded from its path
            return
        try:
            # CDLL gives up the interpreter's lock during calls; PyDLL would stop the whole process in a slow driver.
            library = ctypes.CDLL(self._path)
        except OSError as exc:
            raise NvmlAbsent(f"the NVML library can't be loaded: {exc}") from exc
        if getattr(pynvml.nvmlLib, "_handle", None) != library._handle:
            _use(library)

    def _init_of_old(self) -> None:
        """Drivers older than nvmlInitWithFlags have nvmlInit_v2."""
        try:
            code = pynvml.nvmlLib.nvmlInit_v2()
        except AttributeError as exc:
            raise NvmlAbsent("the NVML library is too old: it has neither nvmlInitWithFlags nor nvmlInit_v2") from exc
        if code:
            raise self._translated("nvmlInit_v2", pynvml.NVMLError(code))


def _use(library: ctypes.CDLL | None) -> None:
    """The library that the binding calls from now on; None = the one that the system's loader finds at the next init."""
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
