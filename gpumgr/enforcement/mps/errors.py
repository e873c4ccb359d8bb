"""What can go wrong with MPS."""

from gpumgr.errors import GpumgrError


class MpsError(GpumgrError):
    """NVIDIA's control program, or what it needs, failed; the text says what, where and what to do."""


class Unanswered(MpsError):
    """The program hung, or the system could not run it just now: that may pass by itself."""
