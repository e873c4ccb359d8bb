"""Checks the installed packages and the locks: `python -m tools.supply` (make supply-check) prints every problem; exit status 1 if any.

Each package that the agent needs must be locked by hash, be installed in the locked version, be unaltered, and have a licence that is
permissive or accepted by name. Neither lock may name an index. requirements.lock must satisfy pyproject.toml.
"""

import base64
import csv
import hashlib
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tools import PROJECT
from tools.sbom import ACCEPTED, LOCK, Pin, at_run_time, is_permissive, license_of, pins

IMAGE_LOCK: Final = PROJECT / "config" / "image" / "requirements.lock"

_SHA256: Final = re.compile(r"sha256:[0-9a-f]{64}")


def problems() -> Iterator[str]:
    """Yields a sentence for each problem."""
    text, image_text = LOCK.read_text(encoding="utf-8"), IMAGE_LOCK.read_text(encoding="utf-8")
    locked, names = pins(text), at_run_time()
    yield from lock_problems(text)
    yield from lock_problems(image_text)
    yield from request_problems(tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"], locked)
    if {name: locked.get(name) for name in names} != pins(image_text):
        yield f"{IMAGE_LOCK.relative_to(PROJECT)} is not what the agent runs on of {LOCK.name}: run `make lock`"
    for name in names:
        yield from package_problems(name, locked.get(name))
    for accepted in ACCEPTED.keys() - set(names):
        yield f"the licence of {accepted} is accepted in tools/sbom.py, but the agent does not run on it"


def lock_problems(text: str) -> Iterator[str]:
    """Yields the problems of a lock's text."""
    for pin in pins(text).values():
        if not pin.hashes or not all(map(_SHA256.fullmatch, pin.hashes)):
            yield f"{pin.name} is not locked by SHA-256"
    for line in text.splitlines():
        if line.startswith("-") or "://" in line:
            yield f"the lock names an index or an option of pip: {line}"


def request_problems(project: Mapping[str, Any], locked: Mapping[NormalizedName, Pin]) -> Iterator[str]:
    """`project` is the table `project` of pyproject.toml."""
    for requirement in map(Requirement, (*project["dependencies"], *project["optional-dependencies"]["dev"])):
        pin = locked.get(canonicalize_name(requirement.name))
        if pin is None or not requirement.specifier.contains(pin.version, prereleases=True):
            yield f"pyproject.toml asks for {requirement}, the lock has {pin and pin.version}: run `make lock`"


def package_problems(name: str, pin: Pin | None) -> Iterator[str]:
    """Yields the problems of an installed package. `pin` None: the package is not locked."""
    if pin is None or version(name) != pin.version:
        yield f"{name} {version(name)} is installed, {pin and pin.version} is locked"
    for file in altered(name):
        yield f"{file} of {name} is not what its wheel held"
    try:
        permissive = is_permissive(license_of(name))
    except LookupError as error:
        yield str(error)
    else:
        if permissive == (name in ACCEPTED):
            yield f"{name} is under {license_of(name)}: it must be permissive, or else accepted in tools/sbom.py"


def altered(name: str) -> Iterator[str]:
    """Yields the files of an installed package that are missing or have another hash than in its wheel."""
    package = distribution(name)
    # RECORD itself: `files` of a distribution leaves out missing files since Python 3.12.
    for file, recorded_hash, _ in csv.reader((package.read_text("RECORD") or "").splitlines()):
        if recorded_hash and not _is_whole(Path(str(package.locate_file(file))), recorded_hash):
            yield file


def _is_whole(path: Path, recorded_hash: str) -> bool:
    if not path.is_file():
        return False
    mode, _, value = recorded_hash.partition("=")
    found = hashlib.new(mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(found).rstrip(b"=").decode() == value


def main() -> None:
    found = list(problems())
    print("\n".join(found) or f"supply-check: {len(at_run_time())} packages are as locked")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
