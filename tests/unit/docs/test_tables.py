"""The tables of docs/*.md agree with the code and are complete."""

import ast
import re
from collections.abc import Iterator
from typing import Final, get_args

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from gpumgr.cli import group
from gpumgr.cluster.claims.lifecycle import FAMILIES as CLAIMS
from gpumgr.cluster.scheduler.metrics import FAMILIES
from gpumgr.common.errors import RefusalCode
from gpumgr.placement.labels import gpu_labels
from gpumgr.settings.schema import is_live, sections
from gpumgr.web.metrics import catalogue
from tests.unit.web.metrics.pictures import snapshot_of
from tools.docs import environment, kubernetes, log_events, refusals
from tools.docs.__main__ import filled, parts
from tools.docs.exit_codes import exits
from tools.docs.log_calls import PACKAGE, events, events_in
from tools.docs.markdown import fill, marks, table
from tools.docs.metrics import CALLS
from tools.docs.settings import entries, settings_tables

#: Reasons of events and conditions; not reasons: the default of an entry without a code, a class, and the beginning of two reasons.
_REASON: Final = re.compile(r"(Gpu|Gpus|Gpumgr)[A-Z][A-Za-z]+")
_NO_REASON: Final = {"GpuNews", "GpuRegistry", "GpumgrConfig"}
_KEY: Final = re.compile(r"(gpumgr\.io|tencent\.com)/[a-z-]+")
#: How CDI calls devices, labels, and annotations that only gpumgr's own processes read (docs/scheduler.md, docs/dra.md).
_NO_KEY: Final = {
    "gpumgr.io/gpu",
    "gpumgr.io/claim-template",
    "gpumgr.io/claims-retried",
    "gpumgr.io/quota",
    "gpumgr.io/scheduler-leader",
    "gpumgr.io/waiting-pods-retried",
}
#: What containers are given; and of the same look, but of MPS' daemons and of the process that tries HAMi-core's library.
_GIVEN: Final = re.compile(r"(CUDA|NVIDIA|GPU|LD|LIBCUDA)_[A-Z0-9_]+")
_OTHERS: Final = {"CUDA_REDIRECT", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_PROTOCOL_VERSION"}


def literals(*packages: str) -> Iterator[str]:
    """All texts in the source of these packages that are values, not prose."""
    for package in packages:
        for file in (PACKAGE / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_documents_agree_with_the_code() -> None:
    stale = [path.name for path, text in filled().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make docs`"


def test_every_setting_has_a_row_with_its_meaning() -> None:
    tables = settings_tables()
    for section, keys in sections().items():
        for key in keys:
            row = re.search(rf"^\| `{section}\.{key}: [^`]+` \| (.*) \|$", tables, re.MULTILINE)
            assert row is not None, f"{section}.{key}"
            assert len(row[1]) > 10
            assert row[1].endswith("*Live.*") == is_live(sections()[section][key])


def test_every_metric_has_a_row() -> None:
    tables = parts()
    for part, names in (
        ("metrics", {name for name, *_ in catalogue()}),
        ("the scheduler's metrics", {family.name for family in FAMILIES}),
        ("the claims controller's metrics", {family.name for family in CLAIMS}),
    ):
        rows = re.findall(r"^\| `(\w+)", tables[part], re.MULTILINE)
        assert {re.sub(rf"^gpumgr_({'|'.join(CALLS)})_", f"gpumgr_{CALLS[0]}_", name) for name in names} == set(rows)


def test_the_row_of_a_call_names_the_other_calls() -> None:
    row = next(line for line in parts()["metrics"].splitlines() if line.startswith("| `gpumgr_allocate_duration_seconds"))
    of_calls = {name.split("_")[1] for name, *_ in catalogue() if re.fullmatch("gpumgr_[a-z]+_duration_seconds", name)}
    assert {call for call in CALLS if f"`{call}`" in row} == of_calls - {CALLS[0]} == set(CALLS[1:])


def test_every_reason_in_the_code_is_documented() -> None:
    told = kubernetes.events_table() + kubernetes.condition_table()
    used = {text for text in literals("agent", "kube", "ledger", "node", "runtime") if _REASON.fullmatch(text)}
    assert len(used) > 10
    assert {reason for reason in used - _NO_REASON if f"`{reason}`" not in told} == set()


def test_every_annotation_in_the_code_is_documented() -> None:
    told = kubernetes.annotations_table() + kubernetes.labels_table()
    packages = ("agent", "cluster", "enforcement", "kube", "kubelet", "ledger", "node", "placement", "runtime")
    used = {text for text in literals(*packages) if _KEY.fullmatch(text)}
    assert len(used) > 5
    assert {key for key in used - _NO_KEY if key not in told} == set()


def test_every_command_documents_its_exit_codes() -> None:
    assert len(exits()) > 10
    for command, codes in exits().items():
        assert {0, 2} <= codes.keys(), command
        if command != "gpumgr run":
            assert codes.keys() <= {0, 1, 2}, command


def test_help_ends_with_the_exit_codes() -> None:
    text = CliRunner().invoke(group, ["gpu", "drain", "--help"]).stdout
    assert re.search(r"Exit codes:\n  0  the GPU is empty\n  1  .*\n  2  .*\n$", text)


def test_every_refusal_is_documented() -> None:
    assert refusals.MEANINGS.keys() == set(get_args(RefusalCode))


def test_every_event_of_the_log_has_a_meaning() -> None:
    assert len(events()) > 100
    needed = {name for name, level in events().items() if log_events.needs_meaning(level)}
    assert needed <= log_events.MEANINGS.keys() <= events().keys(), (
        "give each a line in tools/docs/log_events.py, and run `make docs`"
    )


def test_events_of_the_log_are_found_in_every_form_of_call() -> None:
    source = """
tell = log.info if well else log.warning
log.error("plain")
self._log.exception("of_an_object", number=1)
tell("chosen", why="")
self._later(log.debug, "passed_on", use)
logger.info("of somebody else")
"""
    assert dict(events_in(source)) == {
        "plain": {"error"},
        "of_an_object": {"error"},
        "chosen": {"info", "warning"},
        "passed_on": {"debug"},
    }


def test_the_name_of_a_log_event_is_a_literal() -> None:
    with pytest.raises(ValueError, match=r"^line 1: the name of a log event is no literal: f'gpu_\{code\}'$"):
        list(events_in('log.info(f"gpu_{code}")'))


def test_every_variable_that_is_read_is_documented() -> None:
    asked = r"""environ(?:\.get\(|\[)"([A-Z_]+)"|"([A-Z_]+)" in os\.environ"""
    read = {one or other for file in PACKAGE.rglob("*.py") for one, other in re.findall(asked, file.read_text(encoding="utf-8"))}
    assert len(read) > 5
    assert read - environment.READ.keys() == set()


def test_every_command_with_a_kubeconfig_of_the_environment_is_named() -> None:
    named = {f"gpumgr {name}" for name in re.findall(r"`([a-z]+)`", environment.READ["KUBECONFIG"][0])}
    reading = {name for name in exits() if "$KUBECONFIG" in CliRunner().invoke(group, [*name.split()[1:], "--help"]).stdout}
    assert {" ".join(name.split()[:2]) for name in reading} == named


def test_every_variable_of_containers_is_documented() -> None:
    found = {text for text in literals("compat/gpu_manager/vcuda", "enforcement", "ledger") if _GIVEN.fullmatch(text)}
    given = {f"{text}0" if text.endswith("_") else text for text in found}  # the index of a GPU follows
    assert given - _OTHERS == environment.GIVEN.keys()


def test_every_label_of_a_node_is_documented() -> None:
    snapshot = snapshot_of(1)
    snapshot = replace(snapshot, gpus=(replace(snapshot.gpus[0], model="NVIDIA H100 80GB HBM3"),))
    told = {key for key, _ in kubernetes.LABELS}
    made = gpu_labels(snapshot, describe=True)
    assert told <= made.keys()
    parts_of_versions = {key for key in made.keys() - told if re.search(r"-version\.(major|minor|revision)$", key)}
    assert made.keys() - told == parts_of_versions


def test_a_file_of_settings_is_read_with_its_comments() -> None:
    text = "# of the file\nhttp:\n  # One line\n  # and another.\n  port: 1\n  socket: /x\n"
    assert entries(text) == {"http.port": ("1", "One line and another."), "http.socket": ("/x", "")}


def test_a_part_is_put_between_its_marks_and_nowhere_else() -> None:
    begin, end = marks("x")
    assert fill(f"a\n{begin}\nold\n{end}\nb", {"x": "new"}) == f"a\n{begin}\nnew\n{end}\nb"
    with pytest.raises(ValueError, match="marks"):
        fill("a", {"x": "new"})


def test_cells_stay_in_their_columns() -> None:
    assert table(("a", "b"), [("x|y", "one\ntwo")]) == "| a | b |\n|---|---|\n| x\\|y | one two |"
