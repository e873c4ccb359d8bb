"""The image's lock is the project's own, without what only development needs."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]


def locked(path: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> what is pinned (version and marker), and the hashes."""
    text = "\n".join(line for line in path.read_text().replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#"))
    pins: dict[str, tuple[str, frozenset[str]]] = {}
    for line in filter(str.strip, text.splitlines()):
        pin = re.split(r"\s+--hash", line)[0].strip()
        pins[canonicalize_name(pin.partition("==")[0])] = (pin, frozenset(re.findall(r"--hash=(\S+)", line)))
    return pins


def needed(requirements: list[str], seen: set[str]) -> Iterator[str]:
    """All that these requirements lead to on this machine, by what is installed."""
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if name not in seen and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            seen.add(name)
            yield name
            yield from needed(requires(name) or [], seen)


def test_every_pin_is_the_projects() -> None:
    project, image = locked(ROOT / "requirements.lock"), locked(ROOT / "config" / "image" / "requirements.lock")
    assert image
    assert {name: pin for name, pin in image.items() if project.get(name) != pin} == {}


def test_it_holds_what_the_agent_needs_and_no_more() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    image = locked(ROOT / "config" / "image" / "requirements.lock")
    assert set(image) == set(needed(declared, set()))


@pytest.mark.parametrize("folder", ["config/image", "config/image/hami-core"])
def test_every_pin_has_hashes(folder: str) -> None:
    pins = locked(ROOT / folder / "requirements.lock")
    assert pins
    assert all(hashes for _, hashes in pins.values())
    assert "--require-hashes" in (ROOT / folder / "Dockerfile").read_text()
