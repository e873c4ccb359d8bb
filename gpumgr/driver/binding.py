"""The only module that imports pynvml, NVIDIA's Python binding of NVML.

Its functions convert pynvml's answers: errors become the errors below, bytes become text, missing capabilities become None. All functions
block.
"""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import pynvml

from gpumgr.common.errors import NvmlAbsent, NvmlError

# The codes of nvmlReturn_t that are handled specially.
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
INSUFFICIENT_RESOURCES: Final = 23
ARGUMENT_VERSION_MISMATCH: Final = 25
DEPRECATED: Final = 26

#: The driver, the GPU or the user lacks a capability, so the answer is unknown. This is no failure.
_CAPABILITY: Final = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED})
#: The driver is not loaded, or was reloaded.
_DOWN: Final = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED})
#: (function, code): from this function the code means "nothing found". For an empty list pynvml raises SUCCESS.
_NONE_YET: Final = frozenset(
    {
        ("nvmlDeviceGetProcessUtilization", SUCCESS),
        ("nvmlDeviceGetProcessUtilization", NOT_FOUND),
        ("nvmlDeviceGetProcessesUtilizationInfo", SUCCESS),
        ("nvmlDeviceGetProcessesUtilizationInfo", NOT_FOUND),
        ("nvmlEventSetWait", TIMEOUT),
    }
)

MEMORY_V2: Final = 0x02000028
EVENT_DOUBLE_BIT_ECC: Final = 0x2
EVENT_XID: Final = 0x8
FIELD_RECOVERY_ACTION: Final = 230

#: A list can grow between the query of its size and the fetch.
_LIST_TRIES: Final = 3
_SYSTEM_NAME: Final = "libnvidia-ml.so.1"

Handle = Any
T = TypeVar("T")


class CallError(NvmlError):
    """An NVML function returned an error about a GPU, a link or another object. `gpu`: the UUID, if known."""

    def __init__(self, function: str, code: int, text: str, gpu: str | None = None) -> None:
        super().__init__(f"{function}{f' of {gpu}' if gpu else ''}: {text} (NVML error {code})")
        self.function, self.code, self.text = function, code, text


class DriverDown(NvmlAbsent):
    """The driver is not loaded, or was reloaded: NVML must be initialised again."""


class DriverMismatchError(NvmlError):
    """The kernel's driver and the loaded library have different versions. A process can't load the library twice, so only a new process
    can continue."""


class Binding:
    """One NVML library, loaded from `path` or found by the system's loader.

    pynvml keeps one library per process, so only the Binding that was opened last can be used.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._initialised = 0
        #: UUID -> NVML's index of the GPU, as far as known.
        self.indices: Mapping[str, int] = {}
        #: (function, NVML error number) -> failed calls since the start.
        self.errors: Counter[tuple[str, int]] = Counter()

    def open(self) -> None:
        """Loads the library and initialises NVML. Raises NvmlAbsent, DriverMismatchError or CallError."""
        self._load()
        try:
            self.call("nvmlInit")
        except CallError as exc:
            if exc.code != FUNCTION_NOT_FOUND:
                raise
            self._init_old_library()
        self._initialised += 1

    def close(self) -> None:
        """Shuts NVML down, unless the driver is gone."""
        # NVML counts initialisations. If a shutdown is missing, the GPUs stay open until this process ends.
        count, self._initialised = self._initialised, 0
        with contextlib.suppress(DriverDown):
            for _ in range(count):
                self.call("nvmlShutdown")

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls a function of pynvml and returns its answer. Raises CallError, NvmlAbsent, DriverDown or DriverMismatchError."""
        try:
            answer = getattr(pynvml, function)(*arguments)
        except pynvml.NVMLError as exc:
            raise self._translated(function, exc) from exc
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def ask(self, function: str, *arguments: Any) -> Any | None:
        """Like `call`, but returns None if a capability is missing."""
        try:
            return self.call(function, *arguments)
        except CallError as exc:
            if self.lacks_capability(exc):
                return None
            raise

    def structure(self, name: str, **fields: Any) -> Any:
        return getattr(pynvml, name)(**fields)

    def list_first(self, functions: tuple[str, ...], *arguments: Any) -> list[Any] | None:
        """The list from the first of these functions that the driver has. None if the driver has none of them, or if the list grew too fast
        to be read. Raises CallError."""
        for function in functions:
            for _ in range(_LIST_TRIES):
                try:
                    answer = self.ask(function, *arguments)
                except CallError as exc:
                    if exc.code == INSUFFICIENT_SIZE:
                        continue
                    if exc.code in (SUCCESS, NOT_FOUND):
                        return []
                    raise
                if answer is not None:
                    return list(answer)
                break
        return None

    def on_gpu(self, uuid: str, fn: Callable[[Handle], T]) -> T:
        """`fn`'s result for this GPU's handle. A CallError names the GPU."""
        try:
            return fn(self._handle(uuid))
        except CallError as exc:
            raise CallError(exc.function, exc.code, exc.text, uuid) from exc

    def _handle(self, uuid: str) -> Handle:
        # A search by UUID may initialise other GPUs (NVML's reference), and one of them may hang, so a known index is used first.
        if uuid in self.indices:
            handle = self.call("nvmlDeviceGetHandleByIndex", self.indices[uuid])
            if self.call("nvmlDeviceGetUUID", handle) == uuid:
                return handle
        return self.call("nvmlDeviceGetHandleByUUID", uuid)

    def lacks_capability(self, error: CallError) -> bool:
        return error.code in _CAPABILITY

    def address(self, handle: Handle) -> int | None:
        """The address in a handle; the same for all handles of a GPU."""
        return ctypes.cast(handle, ctypes.c_void_p).value

    def _translated(self, function: str, error: Any) -> NvmlError:
        # pynvml's errors are unhashable and compare badly, so only their number is used.
        code = int(error.value)
        if code not in _CAPABILITY and (function, code) not in _NONE_YET:
            self.errors[function, code] += 1
        if code == LIBRARY_NOT_FOUND:
            return NvmlAbsent("libnvidia-ml.so.1 is not found: the NVIDIA driver is not installed")
        if code in _DOWN:
            return DriverDown(f"the NVIDIA driver is not loaded ({function}: NVML error {code})")
        if code == LIB_RM_VERSION_MISMATCH:
            return DriverMismatchError(
                "the NVIDIA driver was replaced by another version; this process still uses the library of the earlier version"
            )
        return CallError(function, code, str(error))

    def _load(self) -> None:
        if self._path is None:
            if pynvml.nvmlLib is not None and pynvml.nvmlLib._name != _SYSTEM_NAME:
                _use(None)  # an earlier Binding loaded another library
            return
        try:
            # CDLL releases the interpreter's lock during calls; with PyDLL a slow driver would stop the process.
            library = ctypes.CDLL(self._path)
        except OSError as exc:
            raise NvmlAbsent(f"the NVML library can't be loaded: {exc}") from exc
        if getattr(pynvml.nvmlLib, "_handle", None) != library._handle:
            _use(library)

    def _init_old_library(self) -> None:
        try:
            code = pynvml.nvmlLib.nvmlInit_v2()
        except AttributeError as exc:
            raise NvmlAbsent("the NVML library is too old: it has neither nvmlInitWithFlags nor nvmlInit_v2") from exc
        if code:
            raise self._translated("nvmlInit_v2", pynvml.NVMLError(code))


def _use(library: ctypes.CDLL | None) -> None:
    """Sets the library that pynvml calls; None = the one that the system's loader finds at the next init.

    pynvml has no function for this, and its shutdown clears neither the library nor the private cache of function pointers.
    """
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
