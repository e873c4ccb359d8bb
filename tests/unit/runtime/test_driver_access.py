"""Who brings the driver's files into containers, by what containerd and CRI-O report of their runtimes."""

import re
from typing import Any

import pytest

from gpumgr._pb.runtime.v1 import StatusResponse
from gpumgr.common.foreign_text import UnreadableText
from gpumgr.common.rpc import wire
from gpumgr.ledger.answer import DriverAccess
from gpumgr.runtime.cri import Runtimes, driver_access, parse_runtimes
from tests.cri_api import cri, recorded_runtime

TOOLKIT = "/usr/local/nvidia/toolkit/nvidia-container-runtime"
BOTH = {"runc": "/usr/bin/runc", "nvidia": TOOLKIT}


def read(answer: Any) -> Runtimes:
    return parse_runtimes(wire.parse(StatusResponse, answer.SerializeToString()))


def test_the_runtimes_answers_are_read() -> None:
    """CRI-O's has the names alone."""
    program = "/usr/bin/nvidia-container-runtime"
    found = read(recorded_runtime("containerd"))
    assert found == Runtimes(default="nvidia", programs={"nvidia": program})
    assert (found.of_toolkit(), found.describe_default()) == (("nvidia",), f"nvidia ({program})")
    assert read(recorded_runtime("containerd-2")) == Runtimes(default="runc", programs={"nvidia": program, "runc": ""})
    assert read(recorded_runtime("crio")) == Runtimes(default=None, programs={"nvidia": "", "crun": ""})
    answer = recorded_runtime("crio")
    del answer.runtime_handlers[0]
    assert read(answer) == Runtimes(default="crun", programs={"crun": ""})


@pytest.mark.parametrize(
    "config", ["", "null", "[1]", "[" * 100_000, '{"a":' * 100_000, '{"containerd": {"runtimes": 5}}', "NaN"]
)
def test_another_text_is_a_decode_error(config: str) -> None:
    with pytest.raises(UnreadableText):
        read(cri.StatusResponse(info={"config": config}))


@pytest.mark.parametrize("options", [None, {}, {"BinaryName": None}, {"BinaryName": 5}, {"BinaryName": ""}])
def test_a_runtime_without_a_program_of_its_own(options: object) -> None:
    containerd = {"defaultRuntimeName": "runc", "runtimes": {"runc": {"options": options}}}
    assert read(recorded_runtime("containerd", containerd=containerd)).programs == {"runc": ""}


@pytest.mark.parametrize(
    ("runtimes", "mounted", "toolkit", "why"),
    [
        (Runtimes(default="nvidia", programs=BOTH), False, True, rf"nvidia \({TOOLKIT}\), is NVIDIA's container toolkit"),
        (Runtimes(default="runc", programs={"runc": TOOLKIT}), False, True, rf"runc \({TOOLKIT}\), is NVIDIA's"),
        (
            Runtimes(default="runc", programs=BOTH),
            True,
            True,
            r"runc \(/usr/bin/runc\), is not .*; these runtimes belong to the toolkit, .* class: nvidia$",
        ),
        (Runtimes(default="runc", programs={"runc": ""}), True, False, "the default runtime, runc, is not NVIDIA's"),
        (Runtimes(programs={"crun": "", "nvidia": ""}), True, True, "does not report which of its runtimes"),
        (Runtimes(programs={"crun": "", "kata": ""}), True, False, "does not report which of its runtimes"),
        (Runtimes(), True, True, "does not report which of its runtimes"),
        (None, True, True, "has not reported its default runtime"),
    ],
)
def test_files_are_mounted_where_no_toolkit_brings_them(
    runtimes: Runtimes | None, mounted: bool, toolkit: bool, why: str
) -> None:
    """What is open is answered with mounts that a toolkit is kept from adding to."""
    found = driver_access("auto", runtimes)
    assert (found.mounted, found.toolkit) == (mounted, toolkit)
    assert re.search(why, found.why)


@pytest.mark.parametrize(
    "runtimes", [None, Runtimes(default="nvidia", programs=BOTH), Runtimes(default="runc", programs={"runc": ""})]
)
def test_the_setting_decides_alone(runtimes: Runtimes | None) -> None:
    assert driver_access("toolkit", runtimes) == DriverAccess(
        mounted=False, toolkit=True, why="container.driver_files is toolkit"
    )
    found = driver_access("mounts", runtimes)
    assert (found.mounted, found.toolkit) == (True, runtimes is None or "nvidia" in runtimes.programs)
