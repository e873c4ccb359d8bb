"""The log of an agent process: one JSON object per line, stored and awaited."""

import json
from collections.abc import Callable
from typing import Any

from gpumgr.common.aio import LatestValue
from gpumgr.common.foreign_text import decode_json

Line = dict[str, Any]

#: Number of last lines in an error's text.
_TAIL = 12


class AgentLog:
    """All lines so far. `on_line` is called with each new line."""

    def __init__(self, on_line: Callable[[Line], None] = lambda _line: None) -> None:
        self.lines: list[Line] = []
        self._on_line = on_line
        self._count = LatestValue(0)

    def add(self, raw: bytes) -> None:
        """Stores a line that is not a JSON object (such as a traceback) as an event named "text"."""
        text = raw.decode(errors="replace").rstrip("\n")
        try:
            line = decode_json(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            line = {"event": "text", "text": text}
        self.lines.append(line)
        self._on_line(line)
        self._count.set(len(self.lines))

    def find(self, event: str, *, since: int = 0, **fields: object) -> list[Line]:
        """Lines of this event with these fields, from line number `since` on."""
        wanted = {"event": event, **fields}
        return [line for line in self.lines[since:] if wanted.items() <= line.items()]

    async def until(self, event: str, *, since: int = 0, **fields: object) -> Line:
        """Returns the first such line as soon as it is logged."""
        return await self.until_match(lambda line: {"event": event, **fields}.items() <= line.items(), since=since)

    async def until_match(self, matches: Callable[[Line], bool], *, since: int = 0) -> Line:
        """Returns the first line from number `since` on for which `matches` is true, as soon as it is logged."""
        with self._count.subscribe() as counts:
            async for _ in counts:
                for line in self.lines[since:]:
                    if matches(line):
                        return line
                since = len(self.lines)
        raise AssertionError("the subscription is closed by nobody else")

    def tail(self) -> str:
        """The last lines as text, for error messages."""
        return "\n".join(json.dumps(line) if line["event"] != "text" else line["text"] for line in self.lines[-_TAIL:])
