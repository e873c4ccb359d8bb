"""One thing that happened, on one line. Every text comes out of a printable entry."""

from typing import Final

import click

from gpumgr.allocator.history import Entry, What
from gpumgr.cli.showing.amounts import clock_time, cores
from gpumgr.cli.showing.gpu_labels import Gpus

_COLORS: Final[dict[What, str]] = {"granted": "green", "refused": "red", "event": "yellow", "gpu": "yellow", "config": "yellow"}


def history_line(entry: Entry, gpus: Gpus) -> str:
    """Time, what, pod (container), size, GPUs, why; two blanks between them, "-" for what there is not. The second has a colour."""
    what = click.style(f"{entry.what:<7}", fg=_COLORS.get(entry.what))
    cells = f"{_who(entry):<32}  {_size(entry):<10}  {gpus.labels(entry.gpus) or '-':<6}"
    return f"{clock_time(entry.at)}  {what}  {cells}  {_why(entry)}".rstrip()


def _who(entry: Entry) -> str:
    if entry.pod is not None:
        who = "/".join(entry.pod)
    elif entry.pod_uid is not None:
        who = f"pod uid {entry.pod_uid}"
    else:
        who = f"allocation {entry.id}" if entry.id and entry.what != "gpu" else "-"
    return f"{who} ({entry.container})" if entry.container else who


def _size(entry: Entry) -> str:
    if not entry.kind or not entry.size:
        return "-"
    return cores(entry.size) if entry.kind == "core" else f"{entry.size} block{'' if entry.size == 1 else 's'}"


def _why(entry: Entry) -> str:
    return ": ".join(part for part in (entry.evaluator or entry.code, entry.why) if part)
