"""Reads a Dockerfile: the instructions that ours uses, with their arguments filled in. Anything else is an error, never passed over."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_VARIABLE = re.compile(r"\$\{(\w+)\}")
#: In these the builder fills in ${NAME}; a RUN line is left to its shell.
_FILLED: Final = frozenset({"FROM", "ENV", "LABEL", "COPY", "EXPOSE"})
_KNOWN: Final = _FILLED | {"ARG", "RUN", "ENTRYPOINT", "CMD", "HEALTHCHECK"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction of a stage; `args` are what a RUN finds in its environment besides the stage's own."""

    verb: str
    text: str
    args: Mapping[str, str]

    def pairs(self) -> dict[str, str]:
        """NAME=VALUE of ENV and LABEL."""
        return dict(word.partition("=")[::2] for word in shlex.split(self.text))

    def words(self) -> list[str]:
        """The list of ENTRYPOINT and CMD, which must be in JSON."""
        words: list[str] = json.loads(self.text)
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`base` is another stage's name, or an image that comes from elsewhere."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]


def read_stages(path: Path, build_args: Mapping[str, str]) -> list[Stage]:
    """The stages in order, the last one called "shipped". `build_args` go over the defaults of ARG.

    Raises ValueError for an unknown instruction and KeyError for an unknown variable.
    """
    common: dict[str, str] = {}
    stages: list[Stage] = []
    heads: list[tuple[str, str]] = []
    bodies: list[list[Instruction]] = []
    args: dict[str, str] = {}
    for line in _lines(path.read_text()):
        verb, _, text = line.partition(" ")
        text = text.strip()
        if verb not in _KNOWN:
            raise ValueError(f"{path}: the instruction {verb} is unknown to this builder")
        if verb in _FILLED:
            text = _filled(text, args if bodies and verb != "FROM" else common)
        if verb == "FROM":
            base, _, name = text.partition(" AS ")
            heads.append((name.strip() or "shipped", base.strip()))
            bodies.append([])
            args = {}
        elif verb == "ARG":
            name, _, default = text.partition("=")
            (args if bodies else common)[name] = build_args.get(name, default)
        else:
            bodies[-1].append(Instruction(verb=verb, text=text, args=dict(args)))
    for (name, base), body in zip(heads, bodies, strict=True):
        stages.append(Stage(name=name, base=base, instructions=tuple(body)))
    return stages


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values[match[1]], text)


def _lines(text: str) -> Iterator[str]:
    """Whole instructions: comments and empty lines gone, continued lines joined."""
    whole = ""
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole += line.strip() if whole else line
        if whole.endswith("\\"):
            whole = whole[:-1]
        else:
            yield whole
            whole = ""
    if whole:
        raise ValueError(f"the file ends within an instruction: {whole!r}")


def healthcheck_command(stage: Stage) -> list[str]:
    """What HEALTHCHECK runs."""
    (check,) = [each.text for each in stage.instructions if each.verb == "HEALTHCHECK"]
    command: list[str] = json.loads(check.partition("CMD")[2])
    return command
