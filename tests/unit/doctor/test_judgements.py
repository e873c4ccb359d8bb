"""What versions and abilities mean."""

from pathlib import Path

import pytest

from gpumgr.cri.codec import Runtime
from gpumgr.doctor.backends import judge_mps
from gpumgr.doctor.choice import judge_choice
from gpumgr.doctor.finding import State
from gpumgr.doctor.runtime import judge_cdi
from gpumgr.enforcement.mechanism_choice import MechanismChoice
from gpumgr.enforcement.mps.commands import CAVEATS, ControlFeatures, MpsProtocol


@pytest.mark.parametrize(
    ("name", "version", "state", "word"),
    [
        ("containerd", "v2.1.4", "ok", "on by default"),
        ("containerd", "2.0.0-rc.1", "ok", "on by default"),
        ("containerd", "1.7.28", "warning", "off by default"),
        ("containerd", "1.6.36", "error", "no CDI"),
        ("cri-o", "1.33.1", "ok", "on by default"),
        ("cri-o", "1.22.0", "error", "no CDI"),
        ("cri-dockerd", "0.3.4", "warning", "can't be known"),
        ("containerd", "main", "warning", "can't be known"),
    ],
)
def test_cdi_by_the_version_of_the_runtime(name: str, version: str, state: State, word: str) -> None:
    found = judge_cdi(Runtime(name=name, version=version), Path("/var/run/cdi"))
    assert (found.check, found.state) == ("cdi", state)
    assert word in found.message
    assert (found.remedy is None) == (state == "ok")


#: What is said of the limits themselves, by protocol.
MIND = {each: f"; mind: {'; '.join(CAVEATS[each])}" for each in CAVEATS}


@pytest.mark.parametrize(
    ("protocols", "multiuser", "setting", "state", "message"),
    [
        ({2, 3}, "-multiuser-server", "auto", "ok", f"/m speaks protocol 2 and 3 (3 is used), one server for all users{MIND[3]}"),
        ({2, 3}, "-multiuser-server", "2", "ok", f"/m speaks protocol 2 and 3 (2 is used), one server for all users{MIND[2]}"),
        (
            {2},
            None,
            "auto",
            "warning",
            f"/m speaks protocol 2 (2 is used), a server for one user at a time: containers of other users wait{MIND[2]}",
        ),
        ({2}, "-multiuser-server", "3", "error", "/m speaks protocol 2, mps.protocol is 3"),
    ],
)
def test_mps_by_what_the_program_can(
    protocols: set[MpsProtocol], multiuser: str | None, setting: str, state: State, message: str
) -> None:
    found = judge_mps("/m", ControlFeatures(protocols=frozenset(protocols), multiuser_option=multiuser), setting)
    assert (found.check, found.state, found.message) == ("mps", state, message)
    assert (found.remedy is None) == (state == "ok")


def test_in_a_pod_the_daemons_are_the_hosts() -> None:
    both = ControlFeatures(protocols=frozenset({2, 3}), multiuser_option="-m")
    assert (
        "one server for all users, daemons are units of the host's systemd; mind"
        in judge_mps("/m", both, "auto", in_pod=True).message
    )


NO_PROGRAM = {"mps": "no program"}
NO_MECHANISM = "no backend enforces the limits of shares (enforcement.backend is none)"


@pytest.mark.parametrize(
    ("setting", "choice", "state", "message"),
    [
        (
            "auto",
            MechanismChoice(mechanisms=("mps",), obstacles={"vcuda": "no library"}),
            "ok",
            "mps (cores and memory); not: vcuda (no library)",
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
    found = judge_choice(setting, choice, "mps (cores and memory)")
    assert (found.check, found.state) == ("enforcement", state)
    assert found.message.endswith(message)
    assert (found.remedy is None) == (state == "ok")
