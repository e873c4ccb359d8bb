"""Untrusted text for a terminal: names, reasons and messages with any content.

Kubernetes restricts the names of pods, but not those of static pods, an operator's reason, or a damaged checkpoint. Characters with an
effect on a terminal (escape sequences, line ends, bidirectional marks) are written as Python escapes: `\\x1b`.
"""

import json
from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    """The text on one line; every character that is not printable is written as a Python escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cleaned(document: Any) -> Any:
    """The JSON data with every text, including keys, made printable."""
    match document:
        case str():
            return printable(document)
        case Mapping():
            return {printable(str(key)): cleaned(value) for key, value in document.items()}
        case list() | tuple():
            return [cleaned(value) for value in document]
    return document


def json_line(document: Any) -> str:
    """The document as one line of ASCII JSON; json.dumps does not escape DEL."""
    return json.dumps(document).replace("\x7f", "\\u007f")
