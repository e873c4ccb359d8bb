"""`gpumgr config`."""

import json
from pathlib import Path

import yaml
from click.testing import CliRunner

from gpumgr.cli.config import command
from gpumgr.common.errors import InputError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gpumgr.yaml"
    path.write_text(text)
    return path


def test_a_right_file_is_ok(tmp_path: Path) -> None:
    path = write(tmp_path, "http: {port: 80}\n")
    result = CliRunner().invoke(command, ["check", str(path)])
    assert (result.exit_code, result.stdout) == (0, "ok\n")
    result = CliRunner().invoke(command, ["check", str(path), "--output", "json"])
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"ok": True, "problems": []})


def test_a_wrong_file_names_every_mistake(tmp_path: Path) -> None:
    path = write(tmp_path, "http:\n  port: 1e9\nlog: {level: loud}\n")
    result = CliRunner().invoke(command, ["check", str(path)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert [line.partition(": ")[0] for line in result.stderr.splitlines()] == [f"{path}:2", f"{path}:3"]
    result = CliRunner().invoke(command, ["check", str(path), "--output", "json"])
    assert result.exit_code == 2
    first, second = json.loads(result.stdout)["problems"]
    assert (first["file"], first["line"], first["key"]) == (str(path), 2, "http.port")
    assert second["message"] == "'loud' is not allowed; allowed: one of debug, error, info, warning"


def test_shows_the_settings_in_force(tmp_path: Path) -> None:
    path = write(tmp_path, "http: {port: 80}\n")
    result = CliRunner(env={"GPUMGR_LOG_LEVEL": "debug"}).invoke(command, ["show", "--config", str(path)])
    assert result.exit_code == 0
    shown = write(tmp_path, result.stdout)
    assert CliRunner().invoke(command, ["check", str(shown)]).exit_code == 0
    document = yaml.safe_load(result.stdout)
    assert (document["http"]["port"], document["log"]["level"]) == (80, "debug")
    result = CliRunner(env={"GPUMGR_LOG_LEVEL": "debug"}).invoke(command, ["show", "--config", str(shown), "--output", "json"])
    assert json.loads(result.stdout) == document


def test_mistakes_are_an_input_error() -> None:
    result = CliRunner(env={"GPUMGR_HTTP_PORT": "x"}).invoke(command, ["show"])
    assert isinstance(result.exception, InputError)
    assert "environment variable GPUMGR_HTTP_PORT: http.port: 'x' is not allowed" in str(result.exception)
