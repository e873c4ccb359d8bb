"""Which protocol the node uses."""

from pathlib import Path

import pytest

from gpumgr.common.errors import MpsError
from gpumgr.enforcement.mps.commands import ControlFeatures, MpsProtocol, ProtocolSetting, choose_protocol
from gpumgr.enforcement.mps.folders import read_protocol, write_protocol

OLD: ControlFeatures = {2: ""}
NEW: ControlFeatures = {2: "", 3: "--multiuser"}


@pytest.mark.parametrize(
    ("setting", "features", "kept", "chosen"),
    [
        ("auto", OLD, None, 2),
        ("auto", NEW, None, 3),
        ("2", NEW, None, 2),
        ("3", NEW, None, 3),
        ("auto", NEW, 2, 2),  # containers of this node use it
        ("3", NEW, 2, 2),
        ("2", NEW, 3, 3),
    ],
)
def test_choice(setting: ProtocolSetting, features: ControlFeatures, kept: MpsProtocol | None, chosen: MpsProtocol) -> None:
    assert choose_protocol(setting, features, kept) == chosen


def test_a_protocol_that_the_program_lacks_is_refused_with_what_to_do() -> None:
    with pytest.raises(MpsError, match=r"protocol 3 .* set it to auto"):
        choose_protocol("3", OLD, None)
    with pytest.raises(MpsError, match=r"protocol 3 .* drain the node"):
        choose_protocol("auto", OLD, 3)


def test_it_is_kept_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert read_protocol(folder) is None
    write_protocol(folder, 3)
    assert read_protocol(folder) == 3
    (folder / "mps_protocol").write_text("seven\n")
    assert read_protocol(folder) is None
