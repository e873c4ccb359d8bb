"""Loads the operator's settings from three layers: a YAML file, environment variables, flags. A later layer overrides an earlier one, and
all errors are reported at once.

The variable of a key is GPUMGR_<SECTION>_<KEY>. Its value needs no quotes, and commas separate the items of a list. The value `null`, in
the file or a variable, means the default.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from gpumgr.common.errors import SettingsError
from gpumgr.common.units import VCUDA_NAMES
from gpumgr.common.unix_socket import MAX_PATH_BYTES
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import MOST_BURST_PERIOD_SECONDS, Settings, allowed, build, missing_file, sections
from gpumgr.settings.tree import UnreadableError, entries, is_null, line_of, read_tree, value_of

__all__ = ["InvalidSettingsError", "Problem", "Settings", "check_settings", "load_settings", "nearest", "parse_text"]

_PREFIX: Final = "GPUMGR_"
_MAX_SHOWN: Final = 60
#: A slash and the longest name of gpumgr's sockets in the device plugin folder.
_OUR_SOCKET_BYTES: Final = 24
#: NAME=value of the variables that Kubernetes sets for a Service named "gpumgr...". They are not settings.
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_(HOST|PORT(_\w+)?)=.*|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=.*|PORT=(tcp|udp|sctp)://.*)")


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One error. `source` is the file or the name of the layer. `key` is dotted."""

    source: str
    line: int | None = None
    key: str | None = None
    message: str

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return ": ".join(part for part in (place, self.key, self.message) if part)


class InvalidSettingsError(SettingsError):
    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class _Given(msgspec.Struct, frozen=True):
    """The value of a key in one layer. `text`: whether a value that is a string must be converted to the key's type."""

    key: str
    value: object
    source: str
    line: int | None = None
    text: bool = False

    def problem(self, message: str) -> Problem:
        return Problem(source=self.source, line=self.line, key=self.key, message=message)


def load_settings(path: Path | None, *, environ: Mapping[str, str], overrides: Mapping[str, object]) -> Settings:
    """Loads the settings. `overrides` are the flags: dotted key -> typed value or text.

    Raises InvalidSettingsError with all errors of the three layers.
    """
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    written: dict[str, _Given] = {}
    layers = (
        _from_file(path, problems) if path is not None else (),
        _from_environment(environ, problems),
        _from_overrides(overrides, problems),
    )
    for given in chain.from_iterable(layers):
        written[given.key] = given
        converted = _convert(given, problems)
        if given.value is None or converted is None:
            values.pop(given.key, None)
        else:
            values[given.key] = converted
    settings = build(values)
    if not problems:
        problems += [written[key].problem(message) for key, message in _cross_check(settings)]
    if problems:
        raise InvalidSettingsError(problems)
    return settings


def check_settings(path: Path) -> tuple[Problem, ...]:
    try:
        load_settings(path, environ={}, overrides={})
    except InvalidSettingsError as error:
        return error.problems
    return ()


def parse_text(key: str, text: str, source: str) -> object:
    """Converts `text` to the type of `key`. Raises InvalidSettingsError."""
    problems: list[Problem] = []
    value = _convert(_Given(key, text, source, text=True), problems)
    if problems:
        raise InvalidSettingsError(problems)
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the closest known word, or all known words."""
    names = list(known)
    import difflib  # correct settings do not need it

    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(names)}"


# -- values ----------------------------------------------------------------------------------------------------------------


def _convert(given: _Given, problems: list[Problem]) -> object:
    """The value in the type of its key; None for null. A value that can't be converted adds a problem and gives None."""
    section, _, key = given.key.partition(".")
    kind = sections()[section][key]
    value = given.value
    if given.text and isinstance(value, str):
        value = _split(value.strip(), kind)
    if value is None:
        return None
    try:
        _check_texts(value)
        result: object = msgspec.convert(value, kind, strict=not given.text, dec_hook=_absolute_path)
    except (msgspec.ValidationError, ValueError):  # ValueError: numbers of thousands of digits
        problems.append(given.problem(f"{_shown(given.value)} is not allowed; allowed: {allowed(kind)}"))
        return None
    if isinstance(result, float) and not math.isfinite(result):
        problems.append(given.problem(f"{result} is not allowed; allowed: {allowed(kind)}"))
        return None
    return result


def _split(text: str, kind: Any) -> object:
    if text == "null":
        return None
    info = msgspec.inspect.type_info(kind)
    if isinstance(info.type if isinstance(info, msgspec.inspect.Metadata) else info, msgspec.inspect.VarTupleType):
        return [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    return text


def _check_texts(value: object) -> None:
    """Raises UnicodeEncodeError, a ValueError, for lone surrogates, which can't be printed, stored or sent."""
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, str | Path):
            str(item).encode()


def _absolute_path(kind: type, value: object) -> object:
    if isinstance(value, Path):
        value = str(value)
    if kind is not Path or not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ValueError("not an absolute path")
    return Path(value)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints at most 4300 digits of an integer
        return "a number of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


# -- layers ----------------------------------------------------------------------------------------------------------------


def _from_overrides(overrides: Mapping[str, object], problems: list[Problem]) -> Iterator[_Given]:
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        if key in sections().get(section, {}):
            yield _Given(name, value, "flags", text=isinstance(value, str))
        else:
            problems.append(Problem(source="flags", key=name, message=f"unknown key; {nearest(name, _dotted())}"))


def _from_environment(environ: Mapping[str, str], problems: list[Problem]) -> Iterator[_Given]:
    if environ.get("NODE_NAME"):
        yield _Given("node.name", environ["NODE_NAME"], "environment variable NODE_NAME", text=True)
    variables = {_PREFIX + name.replace(".", "_").upper(): name for name in _dotted()}
    for variable, text in environ.items():
        if _SERVICE_LINK.fullmatch(f"{variable}={text}"):
            continue
        name = variables.get(variable)
        if name is not None:
            yield _Given(name, text, f"environment variable {variable}", text=True)
        elif _meant_for_us(variable):
            problems.append(
                Problem(source=f"environment variable {variable}", message=f"no such setting; {nearest(variable, variables)}")
            )


def _meant_for_us(variable: str) -> bool:
    """Whether an unknown variable is probably a mistyped key."""
    known = tuple(f"{_PREFIX}{section.upper()}_" for section in sections())
    return variable.startswith(known)


def _dotted() -> list[str]:
    return [f"{section}.{key}" for section, keys in sections().items() for key in keys]


#: Adds the problem of a line and a dotted key.
_Report = Callable[[int | None, str | None, str], None]


def _from_file(path: Path, problems: list[Problem]) -> Iterator[_Given]:
    def report(line: int | None, key: str | None, message: str) -> None:
        problems.append(Problem(source=str(path), line=line, key=key, message=message))

    try:
        root = read_tree(path)
    except UnreadableError as error:
        report(error.line, None, str(error))
        return
    for section, line, node in _entries(root, None, report):
        if section not in sections():
            report(line, section, _unknown_section(section))
            continue
        for key, key_line, value in _entries(node, section, report):
            name = f"{section}.{key}"
            if key not in sections()[section]:
                report(key_line, name, f"unknown key; {nearest(key, sections()[section])}")
                continue
            try:
                constructed = value_of(value)
            except UnreadableError as error:
                report(key_line, name, f"can't be read ({error}); allowed: {allowed(sections()[section][key])}")
            else:
                yield _Given(name, constructed, str(path), key_line)


def _unknown_section(section: str) -> str:
    owners = [name for name, keys in sections().items() if section in keys]
    if owners:
        return f"unknown section; the key {section!r} belongs to the section {owners[0]!r}"
    return f"unknown section; {nearest(section, sections())}"


def _entries(node: yaml.Node | None, section: str | None, report: _Report) -> Iterator[tuple[str, int, yaml.Node]]:
    """(key, line, value) of a mapping. Null is an empty mapping; a repeated key is an error."""
    if node is None or is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        expected = ", ".join(sections()[section] if section else sections())
        report(line_of(node), section, f"must be a mapping; allowed: {expected}")
        return
    first_lines: dict[str, int] = {}
    for key, line, value in entries(node):
        if key in first_lines:
            report(line, f"{section}.{key}" if section else key, f"appears twice, first in line {first_lines[key]}")
            continue
        first_lines[key] = line
        yield key, line, value


def _cross_check(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yields (dotted key, message) for each error in the combination of settings. The key never has its default value, so `load_settings`
    can name the layer that set it."""
    yield from _socket_paths(settings)
    for section, files in (("http", settings.http), ("scheduler", settings.scheduler)):
        if (found := missing_file(section, files.tls_cert_file, files.tls_key_file, files.client_ca_file)) is not None:
            yield found
    if settings.node.profile != "tencent":
        yield from _hami(settings)
    if settings.hami.operating_mode == "mig":
        yield from (("hami.operating_mode", f"mig {problem}") for problem in _on_mig(settings))
    if settings.node.mig_strategy != "none" and settings.node.mode == "dra":
        yield "node.mig_strategy", f"{settings.node.mig_strategy} needs node.mode plugin: with mode dra no device plugin runs"
    if settings.node.mig_strategy == "single" and settings.node.profile != "tencent":
        name = settings.hami.count_resource
        yield "node.mig_strategy", f"single offers MIG devices as {name}, which node.profile {settings.node.profile} offers, too"
    if settings.enforcement.memory_burst and settings.nvml.sample_period_seconds > MOST_BURST_PERIOD_SECONDS:
        yield (
            "enforcement.memory_burst",
            f"true needs nvml.sample_period_seconds of at most {MOST_BURST_PERIOD_SECONDS:g}: a start waits for two samples",
        )
    yield from _twice("kubernetes.node_labels", settings.kubernetes.node_labels)
    yield from _twice("enforcement.overrides", settings.enforcement.overrides)


def _on_mig(settings: Settings) -> Iterator[str]:
    if settings.node.profile == "tencent":
        yield "needs `node.profile: hami` or `node.profile: both`: MIG devices are created for requests of HAMi's resources"
    if settings.node.mig_strategy != "none":
        yield f"needs node.mig_strategy none: {settings.node.mig_strategy} offers the MIG devices that exist"


def _hami(settings: Settings) -> Iterator[tuple[str, str]]:
    if settings.node.mode == "dra":
        yield "node.profile", f"{settings.node.profile} needs node.mode plugin: with mode dra no device plugin runs"
    if not settings.kubernetes.enabled:
        yield (
            "node.profile",
            f"{settings.node.profile} needs the API server: the requested memory is only in the pod; allowed: tencent",
        )
    default = ReplicaResources()
    keys = [each for each in ReplicaResources.__struct_fields__ if each.endswith("_resource")]
    names = [getattr(settings.hami, key) for key in keys]
    for key, name in zip(keys, names, strict=True):
        if name != getattr(default, key) and [*names, *VCUDA_NAMES].count(name) > 1:
            yield (
                f"hami.{key}",
                f"the names {', '.join(names)} must differ from one another and from {' and '.join(VCUDA_NAMES)}",
            )
            return


def _socket_paths(settings: Settings) -> Iterator[tuple[str, str]]:
    kubelet = settings.kubelet
    for key, path, limit in (
        ("kubelet.device_plugin_dir", kubelet.device_plugin_dir, MAX_PATH_BYTES - _OUR_SOCKET_BYTES),
        ("kubelet.pod_resources_socket", kubelet.pod_resources_socket, MAX_PATH_BYTES),
        ("http.socket", settings.http.socket, MAX_PATH_BYTES),
        ("display.socket", settings.display.socket, MAX_PATH_BYTES),
    ):
        if (length := len(os.fsencode(path))) > limit:
            yield key, f"the path has {length} bytes; allowed: {limit}, since unix sockets can't have longer names"


def _twice(key: str, items: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Errors about names that have several values in the list `items` of name=value texts."""
    names = [item.partition("=")[0] for item in dict.fromkeys(items)]
    for name in dict.fromkeys(each for each in names if names.count(each) > 1):
        yield key, f"{name!r} has {names.count(name)} values; allowed: one"
