"""Texts from pods and users never reach the terminal raw: neither in tables, nor in sentences, nor in JSON."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumgr.agent.api import NodeState, PodDetails
from gpumgr.cli.agent_client import decoded, gpus_of
from gpumgr.cli.formats import cleaned, json_line, printable
from gpumgr.cli.history import history_line
from gpumgr.cli.why import pod_text
from gpumgr.common.errors import GpumgrError
from gpumgr.ledger.history import HistoryEntry
from tests.unit.cli.node_story import NAMES, container, entry, gpu, state, story, usage_text

#: Escape sequence that sets the window's title, one that clears the screen, a line end, a mark that turns the direction of writing,
#: a C1 control, DEL, a lone surrogate, and rich's own markup.
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\r\nfree\u202egnp\x9b31m\x7f\ud800[red]b[/red]"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("team/resnet-0", "team/resnet-0"),
        ("Lüfter défekt", "Lüfter défekt"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\r", "a\\nb\\r"),
        ("\u202egnp", "\\u202egnp"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_a_terminal_would_act_on_is_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_nothing_but_printable_text_comes_out(text: str) -> None:
    assert printable(text).isprintable()


@settings(max_examples=50)
@given(st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_whole_document_is_cleaned_and_its_json_is_plain_ascii_and_the_same(document: object) -> None:
    assert str(cleaned(document)).isprintable()
    line = json_line(document)
    assert all(" " <= letter <= "~" for letter in line)
    assert json.loads(line) == document


def harmless(text: str) -> None:
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "[red]b[/red]" in text


def test_the_tables_show_hostile_names_as_text() -> None:
    facts = {"message": HOSTILE, "healthy": False, "model": HOSTILE, "reason": HOSTILE}
    cordon = {"reason": HOSTILE, "since": 1e300, "draining": False}
    rows = [container("a", HOSTILE, NAMES[0], namespace=HOSTILE, container=HOSTILE, mechanisms=[HOSTILE])]
    document = {**state(), "node": HOSTILE, "not_ready": [HOSTILE], "gpus": [gpu(0, NAMES[0], cordon=cordon, **facts)]}
    for width in (80, None):
        text = usage_text(decoded({**document, "containers": rows}, NodeState), width=width)
        harmless(text.replace("\n", "") if width else text)


def test_the_story_and_the_history_show_hostile_names_as_text() -> None:
    told = entry(1, "event", pod=[HOSTILE, HOSTILE], container=HOSTILE, why=HOSTILE, code=HOSTILE, gpus=[HOSTILE])
    document = {**story(), "pod": HOSTILE, "uid": HOSTILE, "phase": HOSTILE, "history": [told]}
    document["request"] = [{"container": HOSTILE, "kind": HOSTILE, "cores": 1, "memory_blocks": 1}]
    document["allocations"] = [container("a", HOSTILE, NAMES[0], container=HOSTILE, mechanisms=[HOSTILE])]
    read = decoded(document, PodDetails)
    harmless(pod_text(read, gpus_of(()), live=True))
    (line,) = (history_line(entry, gpus_of(())) for entry in decoded([told], list[HistoryEntry]))
    harmless(line.replace("\x1b[33m", "").replace("\x1b[0m", ""))
    assert "\n" not in line


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (NodeState, []),
        (NodeState, {"gpus": [{"name": "x"}], "containers": []}),
        (PodDetails, {**story(), "history": [entry(1, "levitated")]}),
        (list[HistoryEntry], [entry(1, "levitated")]),
    ],
)
def test_an_answer_of_another_version_is_called_one(kind: Any, document: object) -> None:
    with pytest.raises(GpumgrError, match="may be of another version"):
        decoded(document, kind)
