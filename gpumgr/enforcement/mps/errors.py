"""What can go wrong with MPS."""

from gpumgr.errors import GpumgrError


class MpsError(GpumgrError):
    """NVIDIA's control program, or what it needs, failed; the text says what, where and what to do."""
