"""Reads a settings file into a tree of YAML nodes with line numbers.

Any content of the file gives a tree or an error of one sentence. So does an object at the path that is not a regular file.
"""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from gpumgr.common.errors import SettingsError
from gpumgr.common.files import read_bounded

#: Several times the size of config/gpumgr.yaml. PyYAML needs 600 bytes of memory per byte of the file, and reads 100 KiB a second.
MAX_FILE_BYTES: Final = 128 << 10
_MAX_NAME: Final = 60
_MAX_SENTENCE: Final = 300
_NULL: Final = "tag:yaml.org,2002:null"


class UnreadableError(SettingsError):
    """The file, or a value in it, can't be read. `line` counts from 1."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def read_tree(path: Path) -> yaml.Node | None:
    """The document of the file; None if the file is empty. Raises UnreadableError."""
    try:
        content = read_bounded(path, MAX_FILE_BYTES)
    except OSError as error:
        raise UnreadableError(f"can't be read: {error.strerror or error}") from error
    return compose(content)


def compose(content: bytes) -> yaml.Node | None:
    """The document of a text; None if it is empty. Raises UnreadableError."""
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(content)
        tree: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise _no_yaml(said, mark.line + 1 if mark else None) from error
    except yaml.reader.ReaderError as error:
        # The position counts characters if the content could be decoded, otherwise bytes.
        at, decoded = error.position, error.encoding == "unicode"
        encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
        before = content.decode(encoding, "replace")[:at] if decoded else content[:at].decode(encoding, "replace")
        raise _no_yaml(error.reason, before.count("\n") + 1) from error
    except RecursionError as error:
        raise _no_yaml("nested too deeply") from error
    except Exception as error:  # int() and chr() raise for digits that PyYAML does not check
        raise _no_yaml(_sentence(error), loader.line + 1 if loader is not None else None) from error
    return tree


def entries(node: yaml.MappingNode) -> Iterator[tuple[str, int, yaml.Node]]:
    """(key, line, value), with keys made `legible`. A key that is no scalar is "?"."""
    for key, value in node.value:
        yield legible(key.value) if isinstance(key, yaml.ScalarNode) else "?", line_of(key), value


def line_of(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def is_null(node: yaml.Node | None) -> bool:
    return node is None or node.tag == _NULL


def value_of(node: yaml.Node) -> object:
    """The value of a scalar, or of a list of scalars. Nested values are refused, because their aliases could multiply without bound. Raises
    UnreadableError."""
    flat = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(item, yaml.ScalarNode) for item in flat):
        raise UnreadableError("neither a value nor a list of values")
    try:
        value: object = yaml.constructor.SafeConstructor().construct_document(node)
    except Exception as error:  # PyYAML raises any error for a bad tag: `!!bool x` is a KeyError
        raise UnreadableError(_sentence(error)) from error
    return value


def legible(text: str, limit: int = _MAX_NAME) -> str:
    """The text on one line. Lone surrogates and control characters are escaped, because logs, databases and terminals do not accept
    them."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def _no_yaml(why: str, line: int | None = None) -> UnreadableError:
    return UnreadableError(f"no valid YAML: {legible(why, _MAX_SENTENCE)}", line)


def _sentence(error: Exception) -> str:
    """The first line of a YAMLError or ValueError. Other errors are written as their repr, because their text says too little (a KeyError
    has only the key)."""
    said = str(error).partition("\n")[0]
    return legible(said if isinstance(error, yaml.YAMLError | ValueError) and said else repr(error), _MAX_SENTENCE)
