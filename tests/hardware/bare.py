"""`python3 tests/hardware/bare.py WHEELS [ARGUMENT...]`: runs `python -m tests.hardware` on a machine that has only Python and the driver.

WHEELS is a folder with a wheel of each package of config/image/requirements.lock, for that machine's Python; it needs no pip and no
network. Another machine fills it, here for Python 3.12:

pip download --no-deps --only-binary=:all: --python-version 3.12 -r config/image/requirements.lock -d WHEELS

PyTorch is measured if this Python can import it, or if its wheels are in the folder, too.
"""

import os
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]


def main(words: Sequence[str]) -> int:
    """Ends as `python -m tests.hardware`; 2 if the folder has no wheels."""
    wheels = sorted(Path(words[0]).glob("*.whl")) if words else []
    if not wheels:
        print(f"there is no wheel in {words[0]}" if words else __doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpumgr-packages-") as packages:
        for wheel in wheels:
            unpack(wheel, Path(packages))
        path = os.pathsep.join(filter(None, (packages, str(ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "tests.hardware", *words[1:]]
        return os.spawnve(os.P_WAIT, sys.executable, command, {**os.environ, "PYTHONPATH": path})


def unpack(wheel: Path, folder: Path) -> None:
    """Installs what `import` needs of a wheel: all files but the scripts (Binary distribution format, packaging.python.org)."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            first, *rest = PurePosixPath(member.filename).parts
            if first.endswith(".data"):
                if rest[:1] not in (["purelib"], ["platlib"]) or member.is_dir():
                    continue
                member.filename = "/".join(rest[1:])
            archive.extract(member, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
