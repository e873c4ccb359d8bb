"""One object in YAML, or in JSON, which is YAML."""

from typing import Any

import yaml

from gpumgr.common.errors import InputError
from gpumgr.settings.tree import UnreadableError, compose, line_of


def read_object(file: str, content: bytes) -> dict[str, Any]:
    """Raises InputError, which names file and line, also for a key that is there twice."""
    try:
        node = compose(content)
    except UnreadableError as error:
        place = file if error.line is None else f"{file}, line {error.line}"
        raise InputError(f"{place}: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{file}: an object is expected, with apiVersion, kind, metadata and spec")
    try:
        made: dict[str, Any] = _Constructor().construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else line_of(node)
        raise InputError(f"{file}, line {line}: {error.problem}") from error
    except Exception as error:  # PyYAML raises any error for a bad tag
        raise InputError(f"{file}: a value does not have the form that its tag demands, or is nested too deeply") from error
    return made


class _Constructor(yaml.constructor.SafeConstructor):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in keys:
                what = f"the key {key.value} is there twice" if isinstance(key, yaml.ScalarNode) else "a key is no text"
                raise yaml.constructor.ConstructorError(None, None, f"{what}; keep one text for each key", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)
