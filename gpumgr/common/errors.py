"""The errors that several parts of gpumgr raise on purpose. A part's own errors are derived from them and are in its module.

GpumgrError
├── Refusal           a request that must not be granted; its text reaches `kubectl describe pod`
├── InputError        text, file or argument that can't be read; names the problem, its place, and the remedy
│   ├── TopologyError
│   ├── SettingsError
│   └── StateError
├── NvmlError         the driver's library can't answer
│   └── NvmlAbsent    there is no driver (yet)
├── MpsError          NVIDIA's MPS control program, or something that it needs, failed
│   └── MpsTransientError  it hung or could not be run; the next attempt may succeed
│       └── MpsTimeoutError
├── DriverFilesError  the copy of the driver's files for containers can't be made or kept
├── CheckpointError   the checkpoint can't be read or written
│   └── LedgerError   a change is not written because the ledger would contradict itself
├── KubeletError      the kubelet can't be reached, or refused
├── CriError          the container runtime or the kernel's cgroups can't describe containers
└── AlreadyRunning    another agent holds this node's lock
"""

from typing import Literal

RefusalCode = Literal["invalid_request", "no_fit", "gpu_unhealthy", "conflict", "unknown_device", "internal"]


class GpumgrError(Exception):
    """Base of all errors raised on purpose."""


class Refusal(GpumgrError):
    """A request that is not granted. `code` is a bounded label for metrics, `str()` a sentence for the operator."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


class InputError(GpumgrError):
    """Something that a person wrote can't be used."""


class TopologyError(InputError):
    """Topology text or a matrix is malformed."""


class SettingsError(InputError):
    """A settings file, an environment variable or a flag is wrong."""


class StateError(InputError):
    """A state file of `gpumgr place` is malformed."""


class NvmlError(GpumgrError):
    """The driver's library gave an error or no answer in time."""


class NvmlAbsent(NvmlError):
    """The driver or its library is not there (it may be installed later)."""


class MpsError(GpumgrError):
    """NVIDIA's MPS control program, or something that it needs, failed. The text says what failed, where, and what to do."""


class MpsTransientError(MpsError):
    """The control program hung, or the system could not run it. The next attempt may succeed."""


class MpsTimeoutError(MpsTransientError):
    """A program did not end within its time limit."""


class DriverFilesError(GpumgrError):
    """The copy of the driver's files for containers can't be made or kept. The text says where and what to do."""


class CheckpointError(GpumgrError):
    """The checkpoint can't be read or written."""


class LedgerError(CheckpointError):
    """A change would break an invariant of the ledger (a bug). It is neither written nor applied."""


class KubeletError(GpumgrError):
    """The kubelet can't be reached, timed out, or answered with an error."""


class AlreadyRunning(GpumgrError):
    """Another gpumgr agent runs on this node. `pid` is its process id, if it is known."""

    def __init__(self, message: str, *, pid: str | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class CriError(GpumgrError):
    """The container runtime can't be reached or answered with an error, or the host's cgroups can't be read."""
