"""The hardware that a command is about: this machine's, or that of a simulated node."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from gpumgr.driver.hardware import Hardware


@contextmanager
def hardware_of(sim: str | None, library_path: Path | None = None, folder: Path | None = None) -> Iterator[Hardware]:
    """`sim`: name or file of a simulated node. Its files stay in `folder`; without `folder` they are in a temporary one. None: this
    machine, with the driver's library at `library_path` if that is set.

    Raises SettingsError if the node's description is wrong, InputError without a C compiler.
    """
    if sim is None:
        yield Hardware(library_path=str(library_path) if library_path else None)
        return
    from gpumgr.sim.library import prepare  # imported here, since a real node does not need it

    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="gpumgr-sim-") as place:
        node = prepare(sim, Path(place))
        yield Hardware(library_path=node.library_path, sysfs_root=node.sysfs_root, proc_root=node.proc_root, simulated=True)
