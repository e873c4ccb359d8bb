"""The errors that several parts of gpumgr raise on purpose. Modules derive further errors from them.

GpumgrError
├── Refusal
├── InputError
│   └── SettingsError
├── NvmlError
│   └── NvmlAbsent
├── MpsError
│   └── MpsTransientError
│       └── MpsTimeoutError
├── DriverFilesError
├── CheckpointError
│   └── LedgerError
├── KubeletError
├── CriError
└── AlreadyRunning
"""

from typing import Literal

RefusalCode = Literal["invalid_request", "no_fit", "gpu_unhealthy", "conflict", "unknown_device", "internal"]


class GpumgrError(Exception):
    """Base of all errors raised on purpose."""


class Refusal(GpumgrError):
    """A request that must not be granted. `code` is a label's value in metrics. `kubectl describe pod` shows the message."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


class InputError(GpumgrError):
    """Something that a person wrote can't be used, or is missing. The message says what is wrong, where, and what to do."""


class SettingsError(InputError):
    """A settings file, an environment variable or a flag is wrong."""


class NvmlError(GpumgrError):
    """NVML returned an error, or did not answer in time."""


class NvmlAbsent(NvmlError):
    """The driver or its library is absent; it may be installed later."""


class MpsError(GpumgrError):
    """NVIDIA's MPS control program, or something that it needs, failed. The message says what, where, and what to do."""


class MpsTransientError(MpsError):
    """The control program hung, or the system could not run it. A retry may succeed."""


class MpsTimeoutError(MpsTransientError):
    """A program did not end within its time limit."""


class DriverFilesError(GpumgrError):
    """The copy of the driver's files for containers can't be made or kept. The message says where and what to do."""


class CheckpointError(GpumgrError):
    """The checkpoint can't be read or written."""


class LedgerError(CheckpointError):
    """A change would break an invariant of the ledger (the record of the GPUs that each container holds). This is a bug, and the change is
    not written."""


class KubeletError(GpumgrError):
    """The kubelet can't be reached, timed out, or answered with an error."""


class AlreadyRunning(GpumgrError):
    """Another gpumgr agent runs on this node, in the process `pid` if that is known."""

    def __init__(self, message: str, *, pid: str | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class CriError(GpumgrError):
    """The container runtime can't be reached or answered with an error, or the host's cgroups can't be read."""
