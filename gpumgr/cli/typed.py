"""What a person types on the command line: click's types and callbacks that refuse what makes no sense or can't be sent."""

from math import isfinite
from typing import Any

import click

from gpumgr.agent.cordons import REASON_CHARACTERS


class Seconds(click.FloatRange):
    """From 0 on. `nan` compares as neither too small nor over, and `inf` never comes."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not isfinite(seconds):
            self.fail(f"{seconds} is no number of seconds", param, ctx)
        return seconds


def sendable(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    """Python keeps bytes that are no UTF-8 as lone surrogates, which neither JSON nor a URL can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.BadParameter("it is no UTF-8 text; check the terminal's character set (`locale charmap`)") from error
    return text


def reason_text(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """Why a GPU is taken out of service."""
    if len(text) > REASON_CHARACTERS:
        raise click.BadParameter(f"it has {len(text)} characters; {REASON_CHARACTERS} at most")
    return sendable(ctx, param, text)


def gpu_word(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """What people call a GPU. Which one is meant the agent finds out."""
    if not text.strip(" ."):  # dots alone would be taken for folders of the URL
        raise click.BadParameter("no GPU is named: give its index (3 or GPU3), or its UUID or the beginning of it")
    return sendable(ctx, param, text)
