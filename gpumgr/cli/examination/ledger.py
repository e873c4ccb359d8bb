"""Whether this gpumgr can use the agent's checkpoint. It is read as `gpumgr checkpoint show` reads it.

The check changes no content and creates no file. sqlite may rebuild its shared-memory index (-shm) after a killed agent, as the next
agent would. A copy would avoid that, but beside a running agent a copy could mix two states.
"""

from pathlib import Path
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, aside, error_of, ok, warning
from gpumgr.common.errors import CheckpointError
from gpumgr.ledger.checkpoint.files import CorruptError
from gpumgr.ledger.checkpoint.reader import read_checkpoint

IF_HUNG: Final = "look whether the disk under checkpoint.dir answers (`df`)"
_READ: Final = "run the agent, and this, as root, or set checkpoint.dir to a folder that it may read"


async def look_at_checkpoint(folder: Path) -> CheckResult:
    """`folder`: the setting checkpoint.dir."""
    try:
        loaded = await aside(lambda: read_checkpoint(folder))
    except CorruptError as damaged:
        return warning(
            str(damaged), "nothing, or mend the disk: the agent sets the file aside and rebuilds from what the kubelet knows"
        )
    except CheckpointError as exception:
        return error_of(exception, _READ)
    if loaded.lost:
        return ok(f"{loaded.why}: the agent makes one")
    if broken := loaded.ledger.violations():
        return warning(
            f"the checkpoint in {folder} contradicts itself: {broken[0]}",
            "nothing: the agent sets the file aside and rebuilds from what the kubelet knows",
        )
    return ok(f"{len(loaded.ledger.allocations)} allocations in {folder}")
