"""What goes wrong with driver files."""

from gpumgr.errors import GpumgrError


class DriverFilesError(GpumgrError):
    """The mirror of the driver's files can't be made or kept; the text says where and what to do."""
