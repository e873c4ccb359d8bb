"""The image's lock is the project's own, without what only development needs."""

import pytest

from tools import PROJECT
from tools.sbom import LOCK, OURS, at_run_time, pins

IMAGE = PROJECT / "config" / "image"


def test_it_has_the_projects_pins_of_what_the_agent_needs_and_no_more() -> None:
    project, image = pins(LOCK.read_text()), pins((IMAGE / "requirements.lock").read_text())
    assert set(image) == set(at_run_time()) - {OURS}
    assert image == {name: project[name] for name in image}


@pytest.mark.parametrize("folder", ["", "hami-core"])
def test_every_pin_has_hashes(folder: str) -> None:
    found = pins((IMAGE / folder / "requirements.lock").read_text())
    assert found
    assert all(pin.hashes for pin in found.values())
    assert "--require-hashes" in (IMAGE / folder / "Dockerfile").read_text()
