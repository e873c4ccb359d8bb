"""Which protocol the node speaks."""

from pathlib import Path

import pytest

from gpumgr.enforcement.mps import protocol
from gpumgr.enforcement.mps.commands import Abilities, Protocol, ProtocolSetting
from gpumgr.enforcement.mps.errors import MpsError

OLD, NEW = Abilities(protocols=frozenset({2})), Abilities(protocols=frozenset({2, 3}))


@pytest.mark.parametrize(
    ("setting", "abilities", "kept", "spoken"),
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
def test_choice(setting: ProtocolSetting, abilities: Abilities, kept: Protocol | None, spoken: Protocol) -> None:
    assert protocol.settle(setting, abilities, kept) == spoken


def test_a_protocol_that_the_program_lacks_is_refused_with_what_to_do() -> None:
    with pytest.raises(MpsError, match=r"protocol 3 .* set it to auto"):
        protocol.settle("3", OLD, None)
    with pytest.raises(MpsError, match=r"protocol 3 .* drain the node"):
        protocol.settle("auto", OLD, 3)


def test_it_is_kept_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert protocol.read(folder) is None
    protocol.write(folder, 3)
    assert protocol.read(folder) == 3
    (folder / "mps_protocol").write_text("seven\n")
    assert protocol.read(folder) is None
