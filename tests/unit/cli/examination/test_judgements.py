"""The choice of the enforcement backends."""

import pytest

from gpumgr.cli.examination.choice import judge_choice
from gpumgr.cli.examination.examine import State
from gpumgr.enforcement.mechanism_choice import MechanismChoice

NO_PROGRAM = {"mps": "no program"}
NO_MECHANISM = "no backend enforces the limits of shares (enforcement.backend is none)"


@pytest.mark.parametrize(
    ("setting", "choice", "state", "message"),
    [
        (
            "auto",
            MechanismChoice(mechanisms=("mps",), obstacles={"vcuda": "no library"}),
            "ok",
            "GPU 0: memory soft (mps), cores soft (mps); not: vcuda (no library)",
        ),
        ("auto", MechanismChoice(obstacles=NO_PROGRAM), "warning", "(enforcement.backend is auto); not: mps (no program)"),
        (
            "none",
            MechanismChoice(obstacles=NO_PROGRAM),
            "warning",
            "no backend enforces the limits of shares (enforcement.backend is none)",
        ),
        (
            "mps",
            MechanismChoice(mechanisms=("mps",), obstacles=NO_PROGRAM),
            "error",
            "which this node can't carry: mps (no program)",
        ),
    ],
)
def test_the_choice_is_judged_by_the_setting(setting: str, choice: MechanismChoice, state: State, message: str) -> None:
    found = judge_choice(setting, choice, "GPU 0: memory soft (mps), cores soft (mps)")
    assert found.state == state
    assert found.message.endswith(message)
    assert (found.remedy is None) == (state == "ok")
