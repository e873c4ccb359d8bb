"""JSON and YAML from any source: the objects that are read are never much larger than the text."""

import json

import pytest

from gpumgr.common.errors import InputError
from gpumgr.compat.objects import read_documents

TENFOLD = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9))


@pytest.mark.parametrize("text", [TENFOLD, "&a [*a]", "a: &a {x: 1}\nb: {<<: *a}"], ids=["tenfold", "itself", "a merge key"])
def test_aliases_are_refused_before_anything_is_made_of_them(text: str) -> None:
    with pytest.raises(InputError, match=r"it has the alias \*a"):
        read_documents(text)


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 100_000, "{a: " * 100_000, '{"a":' * 100_000], ids=lambda text: text[:5])
def test_what_is_nested_without_end_is_refused_at_once(text: str) -> None:
    with pytest.raises(InputError, match="nested more than 100 levels deep"):
        read_documents(text)


def test_json_and_yaml_are_read_alike_and_empty_documents_are_none() -> None:
    document = {"kind": "List", "items": [{"a": ["1", 2, None, True, 10**30]}]}
    assert read_documents(json.dumps(document).encode()) == read_documents(json.dumps(document)) == [document]
    assert read_documents(b"a: 1\n---\n---\nb: &anchor 2\n") == [{"a": 1}, {"b": 2}]
    assert read_documents("null") == read_documents("") == []


def test_json_is_taken_as_json() -> None:
    """To YAML a number with an exponent, but without a point, is a text."""
    assert read_documents('{"a": 12e3}') == [{"a": 12000.0}]
    assert read_documents("{a: 12e3}") == [{"a": "12e3"}]


@pytest.mark.parametrize("text", ["{", '"\\UFFFFFFFF"', '!!int ""', "!!bool x", b"\xff\xfe\x00", '{"a": "\\ud800"'])
def test_what_is_neither_is_refused_in_one_line(text: bytes | str) -> None:
    with pytest.raises(InputError) as caught:
        read_documents(text)
    assert "\n" not in str(caught.value)
