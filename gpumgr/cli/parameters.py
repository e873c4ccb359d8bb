"""Types and callbacks of click for values on the command line."""

import re
from math import isfinite
from typing import Final

import click

from gpumgr.agent.cordons import REASON_CHARACTERS
from gpumgr.cli.printable import printable
from gpumgr.common.errors import InputError

_UNIT_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION_PART: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([dhms])")


def seconds(_ctx: click.Context, _param: click.Parameter, number: float | None) -> float | None:
    """Refuses `nan` and `inf`, which click accepts as numbers."""
    if number is not None and not isfinite(number):
        raise click.BadParameter(f"{number} is not a number of seconds")
    return number


def sendable(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    """Refuses text that is not UTF-8: Python keeps such bytes as lone surrogates, which neither JSON nor a URL can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.BadParameter("it is not UTF-8 text; check the terminal's character set (`locale charmap`)") from error
    return text


def reason_text(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """The reason of a cordon."""
    if len(text) > REASON_CHARACTERS:
        raise click.BadParameter(f"it has {len(text)} characters; {REASON_CHARACTERS} at most")
    return sendable(ctx, param, text)


def gpu_word(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """The name of a GPU, which the agent resolves."""
    if not text.strip(" ."):  # a URL has another meaning for dots alone
        raise click.BadParameter("the GPU's name is empty: give its index (3 or GPU3), or its UUID or the beginning of it")
    return sendable(ctx, param, text)


def duration_seconds(text: str) -> float:
    """A duration such as 90s, 10m, 1h30m or 2d. Raises InputError."""
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InputError(
            f"'{printable(text)}' is not a duration: expected numbers with d, h, m or s, for example 90s, 1h30m or 2d"
        )
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
