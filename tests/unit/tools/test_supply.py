"""The checks of `make supply-check`, on packages and locks that are wrong; and the locks of the images."""

import base64
import hashlib
from pathlib import Path

import pytest

from tools import PROJECT
from tools.sbom import LOCK, Pin, at_run_time, pins
from tools.supply import lock_problems, package_problems, request_problems

IMAGE = PROJECT / "config" / "image"
HASH = "sha256:" + "0" * 64


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `made` of version 1.0 with one module."""
    folder = tmp_path / "made-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: made\nVersion: 1.0\nLicense-Expression: MIT\n")
    module = tmp_path / "made.py"
    module.write_text("answer = 42\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(module.read_bytes()).digest()).rstrip(b"=").decode()
    (folder / "RECORD").write_text(f"made.py,sha256={digest},12\nmade-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def pin(version: str) -> Pin:
    (found,) = pins(f"made=={version} --hash={HASH}\n").values()
    return found


@pytest.mark.usefixtures("installed")
def test_another_version_than_the_locked_one_is_a_problem() -> None:
    assert list(package_problems("made", pin("1.0"))) == []
    assert list(package_problems("made", pin("1.1"))) == ["made 1.0 is installed, 1.1 is locked"]
    assert list(package_problems("made", None)) == ["made 1.0 is installed, None is locked"]


def test_an_altered_or_missing_file_is_a_problem(installed: Path) -> None:
    (installed / "made.py").write_text("answer = 43\n")
    assert list(package_problems("made", pin("1.0"))) == ["made.py of made is not what its wheel held"]
    (installed / "made.py").unlink()
    assert list(package_problems("made", pin("1.0"))) == ["made.py of made is not what its wheel held"]


@pytest.mark.parametrize(
    ("license", "problem"),
    [
        ("MPL-2.0", "made is under MPL-2.0: it must be permissive, or else accepted in tools/sbom.py"),
        ("GPL-3.0-only", "made names no known licence: read it, and add it to tools/sbom.py"),
    ],
)
def test_a_licence_that_is_not_accepted_is_a_problem(installed: Path, license: str, problem: str) -> None:
    metadata = installed / "made-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("MIT", license))
    assert list(package_problems("made", pin("1.0"))) == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a==1\n", "a is not locked by SHA-256"),
        ("a==1 --hash=sha256:12\n", "a is not locked by SHA-256"),
        (f"--index-url x\na==1 --hash={HASH}\n", "the lock names an index or an option of pip: --index-url x"),
        (f"a==1 --hash={HASH}\n# from https://x\n", "the lock names an index or an option of pip: # from https://x"),
    ],
)
def test_what_is_wrong_with_a_lock(text: str, problem: str) -> None:
    assert list(lock_problems(text)) == [problem]


def test_a_range_without_its_locked_version_is_a_problem() -> None:
    project = {"dependencies": ["a>=2"], "optional-dependencies": {"dev": ["b", "c<3"]}}
    locked = pins(f"a==1 --hash={HASH}\nc==2 --hash={HASH}\n")
    assert list(request_problems(project, locked)) == [
        "pyproject.toml asks for a>=2, the lock has 1: run `make lock`",
        "pyproject.toml asks for b, the lock has None: run `make lock`",
    ]


def test_the_agents_image_has_the_projects_pins_of_what_the_agent_needs_and_no_more() -> None:
    locked = pins(LOCK.read_text())
    assert pins((IMAGE / "requirements.lock").read_text()) == {name: locked[name] for name in at_run_time()}


@pytest.mark.parametrize("folder", ["", "hami-core"])
def test_every_pin_of_an_image_has_hashes(folder: str) -> None:
    found = pins((IMAGE / folder / "requirements.lock").read_text())
    assert found
    assert all(pin.hashes for pin in found.values())
    assert "--require-hashes" in (IMAGE / folder / "Dockerfile").read_text()
