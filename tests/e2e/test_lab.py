"""The part of the lab (tests/lab) that takes less than three minutes: limits, tampering, wrong libraries, the start of MPS."""

import asyncio
from collections.abc import Mapping

import pytest

from tests.lab.files import LabFiles, obstacle
from tests.lab.play import SCENARIOS, Case, cases, play_all
from tests.lab.run import open_run
from tests.lab.scenario import Outcome

_OBSTACLE = obstacle()
_CASES = [] if _OBSTACLE else cases(LabFiles.find(), [scenario for scenario in SCENARIOS if scenario.e2e])


@pytest.fixture(scope="module")
def outcomes() -> Mapping[Case, Outcome]:
    """The results of all cases; they run side by side."""
    with open_run(LabFiles.find()) as run:
        return asyncio.run(play_all(run, _CASES))


@pytest.mark.skipif(_OBSTACLE is not None, reason=f"the lab can't run: {_OBSTACLE}")
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_it_works_with_the_real_program(case: Case, outcomes: Mapping[Case, Outcome]) -> None:
    outcome = outcomes[case]
    if outcome.word == "skipped":
        pytest.skip(outcome.reason)
    assert outcome.word != "failure", f"{case}: {outcome.reason}"
