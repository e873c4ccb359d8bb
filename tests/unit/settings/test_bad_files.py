"""Any content of a settings file, or another object in its place, gives settings, or errors that name the file and the line."""

import os
import socket
import string
import threading
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpumgr.cli import group
from gpumgr.common.errors import InputError
from gpumgr.settings import check_settings, load_settings
from gpumgr.settings.tree import MAX_FILE_BYTES

SHIPPED = Path(__file__).parents[3] / "config" / "gpumgr.yaml"

#: The text of the file, and the beginning of what is said of it.
BAD = {
    'log: {level: "\\UFFFFFFFF"}': "FILE:1: no valid YAML: ",
    'log:\n  level: "\\U00110000"': "FILE:2: no valid YAML: chr() arg not in range(0x110000)",
    f"%YAML 1.{'9' * 5000}\n---\n": "FILE:1: no valid YAML: Exceeds the limit (4300 digits) for integer string conversion",
    'http: {socket: "/run/\\uD800"}': "FILE:1: http.socket: '/run/\\ud800' is not allowed; allowed: an absolute path",
    'log: {level: "\\uD800"}': "FILE:1: log.level: '\\ud800' is not allowed; allowed: one of",
    'nvml:\n  smi_program: "\\uDC80"': "FILE:2: nvml.smi_program: '\\udc80' is not allowed; allowed: a text",
    'container:\n  extra_devices: [/a, "/\\uD800"]': "FILE:2: container.extra_devices: ['/a', '/\\ud800'] is not allowed",
    '"\\uD800\\e[2J": {}': "FILE:1: \\ud800\\x1b[2J: unknown section",
    f'"{"x" * 500}": {{}}': f"FILE:1: {'x' * 60}...: unknown section",
    f"http: {{port: 0x{'f' * 5000}}}": "FILE:1: http.port: a number of thousands of digits is not allowed",
    f"nvml: {{ignored_xids: [0x{'f' * 5000}]}}": "FILE:1: nvml.ignored_xids: a number of thousands of digits is not allowed",
    f"http: {{port: {'9' * 5000}}}": "FILE:1: http.port: can't be read (Exceeds the limit (4300 digits)",
    "[" * 5000: "FILE: no valid YAML: nested too deeply",
    "http: {port: !!bool x}": "FILE:1: http.port: can't be read (KeyError('x'))",
    "http: {port: !!int ''}": "FILE:1: http.port: can't be read (IndexError(",
    "http: {port: !!timestamp x}": "FILE:1: http.port: can't be read (AttributeError(",
    "http: {port: {a: 1}}": "FILE:1: http.port: can't be read (neither a value nor a list of values)",
    "http: {port: &a [*a]}": "FILE:1: http.port: can't be read (neither a value nor a list of values)",
    f"http: *{'x' * 5000}": "FILE:1: no valid YAML: found undefined alias 'xxx",
    "# ééééé\n# ééééé\nlog: {level: \a}": "FILE:3: no valid YAML: special characters are not allowed",
}


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "gpumgr.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    return path


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_said_with_its_line(content: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputError) as caught:
        load_settings(path, environ={}, overrides={"node.name": "n"})
    said = str(caught.value).replace(str(path), "FILE")
    assert said.startswith(BAD[content])
    assert said.isprintable()
    assert len(said) < 1000
    for output in ("text", "json"):
        result = CliRunner().invoke(group, ["config", "check", str(path), "--output", output])
        assert (result.exit_code, type(result.exception)) == (2, SystemExit)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_the_line_is_right_in_every_encoding_of_yaml(encoding: str, tmp_path: Path) -> None:
    (problem,) = check_settings(write(tmp_path, "# é\n# é\nlog: {level: \a}".encode(encoding)))
    assert problem.line == 3


@pytest.mark.parametrize("order", ["little", "big"])
def test_the_line_of_a_lone_surrogate_is_right(order: Literal["little", "big"], tmp_path: Path) -> None:
    """U+0A0A has the byte of a line break twice."""
    encoding = f"utf-16-{order[0]}e"
    content = "\ufeff# \u0a0a\nlog: ".encode(encoding) + 0xD800.to_bytes(2, order) + "\n".encode(encoding)
    (problem,) = check_settings(write(tmp_path, content))
    assert problem.line == 2


def test_a_value_that_grows_when_it_is_written_out_is_not_written_out(tmp_path: Path) -> None:
    """Nine lists of nine of the list before: a gigabyte of text."""
    lists = ["&a0 [x]"] + [f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    (problem,) = check_settings(write(tmp_path, f"log: {{level: [{', '.join(lists)}]}}"))
    assert problem.message.startswith("can't be read (neither a value nor a list of values)")


def test_halves_of_characters_in_the_environment_are_a_problem() -> None:
    for name in ("GPUMGR_HTTP_SOCKET", "GPUMGR_NVML_SMI_PROGRAM"):
        with pytest.raises(InputError, match=name):
            load_settings(None, environ={name: "/run/\udcff"}, overrides={"node.name": "n"})


# -- what is in the file's place ----------------------------------------------------------------------------------------------


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "gpumgr.yaml"
    os.mkfifo(path)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(problem.message for problem in check_settings(path)), daemon=True)
    reader.start()
    reader.join(10)
    assert said == ["can't be read: it is not a regular file"]


def test_a_device_or_a_socket_is_refused(tmp_path: Path) -> None:
    (problem,) = check_settings(Path("/dev/null"))
    assert "not a regular file" in problem.message
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        (problem,) = check_settings(tmp_path / "s")
    assert problem.message.startswith("can't be read: ")


def test_a_file_beyond_the_bound_is_refused_unread(tmp_path: Path) -> None:
    (problem,) = check_settings(write(tmp_path, b"#" * (MAX_FILE_BYTES + 1)))
    assert problem.message == f"can't be read: it has more than {MAX_FILE_BYTES} bytes"
    assert check_settings(write(tmp_path, b"#" * MAX_FILE_BYTES)) == ()
    assert len(SHIPPED.read_bytes()) * 4 < MAX_FILE_BYTES < 1 << 20


# -- anything ------------------------------------------------------------------------------------------------------------------

#: What YAML gives a meaning, and what is at its edges.
PIECES = st.sampled_from(
    [
        *":-?[]{},#!|>'=~\"\t\r\n",
        *("&a", "*a", "!!int", "!!bool", "!!float", "!!timestamp", "!!binary", "%YAML 1.1\n---\n", "%TAG", "---", "...", "<<: "),
        *('"\\UFFFFFFFF"', '"\\uD800"', '"\\x00"', "\N{BOM}", "\x85", "\N{LINE SEPARATOR}", "0x" + "f" * 4000, "1:" * 50),
        *("2026-99-99", ".nan", "1e999", "!<x>", "!a%FF "),
    ]
)
TEXTS = st.text(string.ascii_letters + string.digits + " \n:{}[]-&*!#'\"|>%@`,?\t\\\x00\N{SNOWMAN}\ud800", max_size=80)


def loads_or_says_why(folder: Path, content: str | bytes) -> None:
    path = write(folder, content)
    said = ""
    try:
        load_settings(path, environ={}, overrides={"node.name": "n"})
    except InputError as error:
        said = str(error)
    assert all(line.startswith(str(path)) for line in said.splitlines())
    assert said.encode().decode() == said


@given(content=st.one_of(st.binary(max_size=200), TEXTS, st.lists(PIECES | TEXTS, max_size=12).map("".join)))
def test_any_content_loads_or_is_an_input_error(content: str | bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    loads_or_says_why(tmp_path_factory.getbasetemp(), content)


LINES = [line for line in SHIPPED.read_text().splitlines() if not line.lstrip().startswith("#")]


@hypothesis_settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_the_shipped_file_changed_in_any_way_loads_or_is_an_input_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A few pieces put in, or put in place of the text there: of a value, of a key, of anything."""
    text = "\n".join(LINES)
    for _ in range(data.draw(st.integers(1, 3))):
        colons = [n + 1 for n, letter in enumerate(text) if letter == ":"]
        begin = data.draw(st.sampled_from(colons) | st.integers(0, len(text))) if colons else 0
        end = data.draw(st.sampled_from([begin, text.find("\n", begin)]) | st.integers(begin, len(text)))
        text = text[:begin] + data.draw(st.just(" ") | st.just("")) + data.draw(PIECES | TEXTS) + text[max(end, begin) :]
    loads_or_says_why(tmp_path_factory.getbasetemp(), text)
