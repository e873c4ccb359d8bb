"""A host, or an image of one, whose files a command changes."""

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpumgr.errors import GpumgrError

#: What `systemctl is-active` says of a unit that has, or is about to have, a process. A Type=notify one is "activating" until it is READY.
_RUNNING: Final = frozenset({"active", "activating", "reloading"})
#: As many as the kernel follows. Source: path_resolution(7).
_MOST_LINKS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where it goes. `root` None: this host as it runs; else the folder of an image, where nothing is started."""

    root: Path | None
    dry_run: bool = False
    #: What was done, or would be, one line each.
    told: list[str] = field(default_factory=list)

    def resolve(self, path: Path) -> Path:
        """A path of the host with all links followed, as the host does."""
        return path.resolve() if self.root is None else resolve_in(self.root, path)

    def path(self, path: Path) -> Path:
        """Where that lies for us which a path of the host leads to."""
        return path if self.root is None else self.root / self.resolve(path).relative_to("/")

    def place(self, path: Path) -> Path:
        """Where a path of the host lies for us, be it a link itself."""
        return self.path(path.parent) / path.name

    def text(self, path: Path) -> str | None:
        """What the host's file holds, be it text or not: `write` makes the same bytes of it. None if it is not there."""
        try:
            return self.path(path).read_bytes().decode(errors="surrogateescape")
        except FileNotFoundError:
            return None

    def write(self, path: Path, text: str) -> None:
        """Puts a file in place, whole or not at all."""
        if self.text(path) == text:
            self.told.append(f"unchanged  {path}")
            return
        if self._tell(f"write      {path}"):
            target = self.place(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = target.with_name(f".{target.name}.new")
            beside.write_bytes(text.encode(errors="surrogateescape"))
            beside.chmod(0o644)
            os.replace(beside, target)

    def remove(self, path: Path) -> bool:
        """Removes a file or a link, and answers whether it is there."""
        there = os.path.lexists(self.place(path))
        if there and self._tell(f"remove     {path}"):
            self.place(path).unlink()
        return there

    def remove_empty(self, folder: Path) -> None:
        """Removes a folder if nothing is in it."""
        with contextlib.suppress(OSError):
            if not self.dry_run:
                self.path(folder).rmdir()

    def systemctl(self, *arguments: str) -> None:
        """Has systemd do something; in an image there is none that could. Raises GpumgrError."""
        if self.root is not None or not self._tell(f"run        systemctl {' '.join(arguments)}"):
            return
        done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise GpumgrError(f"systemctl {' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()}")

    def is_running(self, unit: str) -> bool:
        """Whether the unit runs on this host, or tries to."""
        if self.root is not None or shutil.which("systemctl") is None:
            return False
        return subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True).stdout.strip() in _RUNNING

    def _tell(self, line: str) -> bool:
        """Whether it is to be done, too."""
        self.told.append(f"would {line}" if self.dry_run else line)
        return not self.dry_run


def resolve_in(root: Path, path: Path) -> Path:
    """What the image's `path` names when the image runs: all links followed, and none of them out of it, as chroot(2) has it.

    The answer is a path of the image, too; what of it does not exist is taken as it is written. Raises GpumgrError for a loop.
    """
    done, ahead, links = Path("/"), [*reversed(path.parts[1:])], 0
    while ahead:
        part = ahead.pop()
        if part == "..":
            done = done.parent
            continue
        here = root / done.relative_to("/") / part
        if not here.is_symlink():
            done /= part
            continue
        links += 1
        if links > _MOST_LINKS:
            raise GpumgrError(f"{path} in {root}: its links lead in a circle; mend them first")
        target = Path(os.readlink(here))
        done = Path("/") if target.is_absolute() else done
        ahead += [each for each in reversed(target.parts) if each != "/"]
    return done
