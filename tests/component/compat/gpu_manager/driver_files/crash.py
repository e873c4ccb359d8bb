"""Ends the process that updates a mirror at every step that it makes on disk, and looks at what is left.

`python -m tests.component.compat.gpu_manager.driver_files.crash ROOT BASE...`: a child process for each
step. Prints how many steps there were.
"""

import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

from gpumgr.compat.gpu_manager.driver_files.discovery import inspect
from gpumgr.compat.gpu_manager.driver_files.mirror import build, is_current, switch
from gpumgr.compat.gpu_manager.driver_files.volumes import VolumePlan, plan_volume

_STEPS = frozenset({"open", "os.mkdir", "os.link", "os.symlink", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.utime"})
_CRASHED = 9


def update(new: VolumePlan, base: Path) -> None:
    build(new, base)
    switch(new, base / "origin", now_seconds=0.0)


def crash_at(step: int, work: Callable[[], None]) -> bool:
    """Runs `work` in a child that ends before its step of this number. False: it had no such step."""
    child = os.fork()
    if child == 0:
        steps = count()

        def hook(event: str, _: object) -> None:
            if event in _STEPS and next(steps) == step:
                os._exit(_CRASHED)

        sys.addaudithook(hook)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, _CRASHED), f"step {step}: the child ended with {code}"
    return code == _CRASHED


def check(base: Path, allowed: list[VolumePlan], step: int) -> None:
    """The name leads to a complete version, or to nothing if `allowed` has but one plan."""
    link = base / "origin"
    if not link.is_symlink():
        assert len(allowed) == 1, f"step {step}: the name is gone"
        return
    complete = [each for each in allowed if link.resolve() == base / ".versions" / each.version / "origin"]
    assert complete, f"step {step}: {os.readlink(link)}"
    assert is_current(link.resolve().parent, complete[0]), f"step {step}: the version is not complete"


def main(root: Path, work: Path) -> None:
    old, new = (
        plan_volume(
            "origin",
            libraries=[inspect(path, path.name) for path in sorted((root / folder).iterdir()) if not path.is_symlink()],
            binaries=[],
            machine=sys.argv[3],
            driver_version="1.2",
        )
        for folder in ("old", "new")
    )
    for step in count():
        fresh, updated = work / f"fresh-{step}", work / f"updated-{step}"
        (fresh / "origin").mkdir(parents=True)
        (fresh / "origin" / "of-gpu-manager").touch()
        update(old, updated)
        first = crash_at(step, lambda fresh=fresh: update(new, fresh))  # type: ignore[misc]
        second = crash_at(step, lambda updated=updated: update(new, updated))  # type: ignore[misc]
        check(fresh, [new], step)
        check(updated, [old, new], step)
        for base in (fresh, updated):
            update(new, base)
            check(base, [new, new], step)
            assert not [name for name in os.listdir(base / ".versions") if name.startswith(".")], f"step {step}: leftovers"
        assert (fresh / "origin.gpu-manager" / "of-gpu-manager").exists(), f"step {step}: gpu-manager's folder is gone"
        assert is_current(updated / ".versions" / old.version, old), f"step {step}: the old version changed"
        if not first and not second:
            print(step)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
