"""What the agent says of its ResourceSlice in mode dra, and of the driver's files."""

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from gpumgr.agent.inventory import Inventory
from gpumgr.kubelet.slice_publisher import PublisherState
from gpumgr.settings import Settings
from gpumgr.web.metrics import Metrics
from gpumgr.web.read_model import ReadModel

REFUSED = "HTTP 403: resourceslices is forbidden"
NO_SHARING, NO_TAINTS = "the gate DRAConsumableCapacity is off", "the gate DRADeviceTaints is off"


def model(state: PublisherState | None) -> ReadModel:
    """None: of a node in mode plugin."""
    components = SimpleNamespace(
        settings=Settings(),
        metrics=Metrics(node="n", version="0"),
        agent_state=SimpleNamespace(inventory=Inventory()),
        link=SimpleNamespace(states={}),
        hardware_events=SimpleNamespace(driver_up=True),
        dra=None if state is None else SimpleNamespace(publisher=SimpleNamespace(state=state)),
    )
    unused = cast("Any", None)
    return ReadModel(cast("Any", components), pods=unused, maintenance=unused, api_queue=unused)


@pytest.mark.parametrize(
    ("state", "reasons", "warnings"),
    [
        (None, [], ()),
        (PublisherState(), [], ()),
        (PublisherState(published=True, devices=8), [], ()),
        (PublisherState(error=REFUSED), [f"the ResourceSlice is not published: {REFUSED}"], ()),
        (PublisherState(devices=8, error=REFUSED), [f"the ResourceSlice is not published: {REFUSED}"], ()),
        (PublisherState(published=True, dropped=NO_SHARING), [NO_SHARING], ()),
        (PublisherState(published=True, devices=8, dropped=NO_TAINTS), [], (NO_TAINTS,)),
    ],
)
def test_a_node_is_ready_unless_its_slice_offers_nothing(
    state: PublisherState | None, reasons: list[str], warnings: tuple[str, ...]
) -> None:
    found = model(state)
    assert found.not_ready() == reasons
    assert found._slice_troubles(offered=True) == warnings


@pytest.mark.parametrize(("trouble", "warnings"), [(None, ()), ("CUDA can't start", ("CUDA can't start",))])
def test_trouble_with_the_drivers_files_is_a_warning(trouble: str | None, warnings: tuple[str, ...]) -> None:
    components = MagicMock(dra=None)
    components.agent_state.inventory = Inventory()
    components.enforcement.driver_files.trouble.return_value = trouble
    found = ReadModel(components, pods=MagicMock(), maintenance=MagicMock(), api_queue=MagicMock())
    assert found.report().warnings == warnings
