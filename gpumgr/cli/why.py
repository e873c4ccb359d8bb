"""`gpumgr why`: a pod's whole story, from its request to where it sits, or the sentence that refused it."""

import asyncio
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import click

from gpumgr.allocator.pods import PodKey
from gpumgr.cli.asking.documents import read_state, read_story
from gpumgr.cli.asking.memory import Document, memory_of
from gpumgr.cli.asking.naming import nothing_known
from gpumgr.cli.asking.where import Where, find_agent, where_options
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.pod_word import PodWord
from gpumgr.cli.printable import json_line
from gpumgr.cli.showing.gpu_labels import gpus_of
from gpumgr.cli.showing.story_text import story_text
from gpumgr.cli.typed import sendable
from gpumgr.errors import GpumgrError

_EPILOG = """
\b
Examples:
  gpumgr why team/resnet-0
  gpumgr why resnet-0                  (in any namespace, if one pod of this node has that name)
  gpumgr why team/resnet-0 --output json | jq '.history[] | select(.what == "refused")'
"""
_EXIT_CODES: Final = {
    0: "done",
    1: "nothing is known of the pod, or neither agent nor checkpoint can be read",
    2: "wrong usage or settings, or a name that several pods have",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a memory has: the story, if there is one, the node's state, and, where they were looked for, the pods that it knows."""

    story: Document | None
    state: Document
    known: frozenset[PodKey] = frozenset()
    live: bool


@click.command(
    "why",
    cls=ExitingCommand,
    short_help="Tell why a pod sits where it sits, or was refused.",
    epilog=_EPILOG,
    exit_codes=_EXIT_CODES,
)
@click.argument("pod", callback=sendable)
@where_options
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How to print.")
def command(pod: str, file: Path | None, socket: Path | None, output: Literal["text", "json"]) -> None:
    """Tell why POD (NAME or NAMESPACE/NAME) sits where it sits, or why it was refused.

    Without a namespace it is "default", or the one where the only pod of this name on this node is. Without the agent the checkpoint
    tells; what the pod uses now is then not known.
    """
    where = find_agent(file, socket)
    word = PodWord.of(pod)
    answer = asyncio.run(_look(where, word))
    if answer.story is None:
        raise GpumgrError(nothing_known(word, answer.known))
    if output == "json":
        click.echo(json_line({**answer.story, "live": answer.live}))
        return
    story = read_story(answer.story)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    gpus = gpus_of(read_state(answer.state).gpus, story.history)
    click.echo(story_text(story, gpus, live=answer.live, width=width))


async def _look(where: Where, word: PodWord) -> _Answer:
    async with memory_of(where) as memory:
        told = await memory.story(word.namespace, word.name) if word.namespace is not None else None
        known = await memory.pods() if told is None else frozenset[PodKey]()
        if word.namespace is None:
            told = await memory.story(*word.among(known))
        return _Answer(story=told, state=memory.state, known=known, live=memory.live)
