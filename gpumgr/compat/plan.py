"""A migration plan, as text for people and as JSON for scripts, and its settings file."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any, Final, Literal

import msgspec
import yaml
from msgspec.structs import asdict, replace

from gpumgr.common.errors import InputError
from gpumgr.common.files import replace_file
from gpumgr.settings import Settings, load_settings
from gpumgr.settings.schema import flat, plain, sections


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`settings`: dotted key -> YAML value that differs from the default. `pods`: the consequence for each container. `notes`: what has no
    counterpart in gpumgr or works differently. `warnings`: what prevents the migration now. The other fields are shell commands in the
    order of their execution, with comments after "#". Values from files are quoted.
    """

    settings: Mapping[str, object]
    pods: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    rollback: tuple[str, ...] = ()
    clean_up: tuple[str, ...] = ()

    def written(self, write: Callable[[str], str]) -> "Plan":
        lines: dict[str, Any] = {name: tuple(map(write, getattr(self, name))) for name in _TITLES}
        return replace(self, **lines)

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "settings": nested(self.settings)}


#: This label decides whether gpumgr's DaemonSet runs on a node, before all other labels (config/helm/gpumgr/values.yaml).
NODE_LABEL: Final = "gpumgr.io/node"
_HELM_INSTALL: Final = "helm upgrade --install gpumgr config/helm/gpumgr --namespace kube-system"

_TITLES: Final[Mapping[str, str]] = {
    "warnings": "Resolve first",
    "pods": "Pods",
    "notes": "Differences",
    "stop": "1. Stop",
    "start": "3. Start",
    "rollback": "Way back",
    "clean_up": "Clean up (after this there is no way back)",
}


def text_of(plan: Plan, to: str) -> str:
    """`to`: the settings file that step 2 writes."""
    parts = [(title, getattr(plan, name)) for name, title in _TITLES.items()]
    written = settings_yaml(plan.settings).splitlines() if plan.settings else ["# nothing: the defaults apply"]
    parts.insert(list(_TITLES).index("start"), (f"2. {to} (--apply writes it)", written))
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts if lines) + "\n"


# -- commands ----------------------------------------------------------------------------------------------------------------


def start_commands(node: str, to: Path, *, requirement: str = "", values: str = "", kustomize: str) -> Iterator[str]:
    """Check the settings file and start gpumgr. `requirement`: a clause about what gpumgr's DaemonSet needs; `values`: further options of
    `helm`; `kustomize`: what a kustomization needs instead of these options."""
    yield f"gpumgr config check {quote(str(to))}"
    yield f"gpumgr doctor --before-start --config {quote(str(to))}"
    yield f"systemctl enable --now gpumgr    # or, with gpumgr's DaemonSet{requirement}:"
    yield f"{_HELM_INSTALL}{values}    # add your own values; with kustomize: {kustomize}"
    yield f"kubectl label node {quote(node)} {NODE_LABEL}=enable --overwrite"


def stop_commands(node: str) -> Iterator[str]:
    yield "systemctl disable --now gpumgr    # or, with gpumgr's DaemonSet:"
    yield f"kubectl label node {quote(node)} {NODE_LABEL}=disable --overwrite"


def label_command(node: str, labels: Mapping[str, str], *, remove: bool = False) -> str:
    changes = (f"{key}-" if remove else f"{key}={value}" for key, value in labels.items())
    return f"kubectl label node {quote(node)} {' '.join(map(quote, changes))}"


# -- settings ----------------------------------------------------------------------------------------------------------------


def differing(overrides: Mapping[str, object]) -> Mapping[str, object]:
    """The overrides (dotted keys, typed values or text) that differ from the defaults, as YAML values. Raises InvalidSettingsError."""
    wanted, usual = load_settings(None, environ={}, overrides=overrides), flat(Settings())
    written = {f"{section}.{key}": value for section, keys in plain(wanted).items() for key, value in keys.items()}
    changed = [key for key, value in flat(wanted).items() if value != usual[key]]
    return {key: list(value) if isinstance(value := written[key], tuple) else value for key in changed}


def nested(values: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Section -> key -> value, in the order of a settings file."""
    return {
        section: {key: values[f"{section}.{key}"] for key in keys if f"{section}.{key}" in values}
        for section, keys in sections().items()
        if any(f"{section}.{key}" in values for key in keys)
    }


def settings_yaml(values: Mapping[str, object]) -> str:
    document = nested(values)
    return yaml.safe_dump(document, sort_keys=False) if document else "{}\n"


def write_settings(path: Path, text: str) -> Literal["written", "unchanged"]:
    """Creates the file and missing folders above it. Raises InputError if it can't be written, or if it exists with other content."""
    try:
        with contextlib.suppress(FileNotFoundError):
            if path.read_text(encoding="utf-8") == text:
                return "unchanged"
            raise InputError(f"{path} exists and has other content; move it away, or name another file with --to")
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            replace_file(new, text)
            os.link(new, path)  # unlike rename, link never replaces a file that was created in between
        finally:
            new.unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be written: {error}; name another file with --to") from error
    return "written"
