"""Words that a person types on the command line and that go to the agent: click's callbacks that refuse what can't be sent."""

import click


def sendable(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    """Python keeps bytes that are no UTF-8 as lone surrogates, which neither JSON nor a URL can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.BadParameter("it is no UTF-8 text; check the terminal's character set (`locale charmap`)") from error
    return text


def gpu_word(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """What people call a GPU. Which one is meant the agent finds out."""
    if not text.strip(" ."):  # dots alone would be taken for folders of the URL
        raise click.BadParameter("no GPU is named: give its index (3 or GPU3), or its UUID or the beginning of it")
    return sendable(ctx, param, text)
