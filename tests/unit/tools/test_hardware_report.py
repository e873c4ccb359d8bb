"""The report of the measurements on a GPU."""

import json

from tests.hardware.measure import MechanismResult, ShareResult
from tests.hardware.report import as_json, as_markdown

MIB = 1 << 20
SHARE = ShareResult(
    cores=25,
    limit_bytes=5120 * MIB,
    total_bytes=5120 * MIB,
    granted_bytes=4800 * MIB,
    refusal=2,
    rate_percent=24.96,
    agent_bytes=None,
)
RESULTS = (
    MechanismResult(mechanism="mps", uses="mps (cores and memory)", alone=(SHARE,), logged=("enforcement_finding: changed",)),
    MechanismResult(mechanism="hami-core", obstacle="no library was given: --hami-core FILE"),
)


def test_a_row_shows_the_limit_and_what_was_granted() -> None:
    text = as_markdown({"driver": "580.159.04"}, RESULTS)
    assert "| one | 25 % | 25.0 % | 5120 MiB | 5120 MiB | 4800 MiB | out of memory | - |" in text
    assert "driver: 580.159.04" in text


def test_a_mechanism_that_was_not_measured_shows_the_reason() -> None:
    text = as_markdown({}, RESULTS)
    assert "**Not measured to the end:** no library was given: --hami-core FILE" in text
    assert "* enforcement_finding: changed" in text


def test_json_has_the_same_figures_with_units_in_their_names() -> None:
    document = json.loads(as_json({"driver": "580.159.04"}, RESULTS))
    assert document["machine"] == {"driver": "580.159.04"}
    assert document["mechanisms"][0]["alone"][0]["granted_bytes"] == 4800 * MIB
    assert document["mechanisms"][1]["obstacle"] == "no library was given: --hami-core FILE"
