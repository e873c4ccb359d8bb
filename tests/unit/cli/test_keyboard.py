"""Which keys the bytes of a terminal are."""

import pytest

from gpumgr.cli.rendering.keyboard import keys_of


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"q", ["q"]),
        (b"xq \n", ["x", "q", " ", "\n"]),
        (b"\x1b[A\x1bOBq", ["up", "down", "q"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page_up", "page_down", "home", "end"]),
        (b"\x1b[1;5A\x1b[15~\x1bOP\x1b[20q", []),
        (b"\x1b", []),
        ("\u00fcq\xff".encode(), ["\u00fc", "q", "\xff"]),
        (b"\xffq", ["\ufffd", "q"]),
        (b"", []),
    ],
)
def test_letters_and_keys_that_move(typed: bytes, keys: list[str]) -> None:
    assert keys_of(typed) == keys
