"""What the unit's sandbox denies the agent: hidden paths, read-only folders of the settings, and rights that only some settings need."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumgr.cli.examination.folders import written
from gpumgr.common.errors import InputError
from gpumgr.settings import Settings
from gpumgr.settings.schema import plain

#: The first words of our drop-in. A file of its name without them is the operator's.
MARK: Final = "# Written by `gpumgr install systemd`"
_ROOT: Final = Path("/")
_LEDGER: Final = "checkpoint.dir"
_PLUGINS: Final = "kubelet.device_plugin_dir"
#: Directives that hide paths, and their values that show them again. Source: systemd.exec(5).
_HIDING: Final[Mapping[str, tuple[str, ...]]] = {
    "ProtectHome": ("/home", "/root", "/run/user"),
    "PrivateTmp": ("/tmp", "/var/tmp"),
}
_SHOWING: Final[Mapping[str, str]] = {"ProtectHome": "read-only", "PrivateTmp": "no"}
_NO: Final = frozenset({"no", "false", "off", "0", "n", "f"})
_VISIBLE: Final = _NO | {"read-only"}
#: Directives of folders that systemd creates and keeps writable, and their parents.
_OWN_FOLDERS: Final[Mapping[str, str]] = {
    "StateDirectory": "/var/lib",
    "ConfigurationDirectory": "/etc",
    "RuntimeDirectory": "/run",
}
#: What modprobe needs beyond the unit; lists are added to the unit's own.
_LOADING: Final = ("ProtectKernelModules=no", "CapabilityBoundingSet=CAP_SYS_MODULE", "SystemCallFilter=@module")
#: Words that need no quotes in a unit.
_PLAIN: Final = re.compile(r"[A-Za-z0-9/._+:@=,-]+")
_COMMENT: Final = re.compile(r"^[ \t]*[#;].*\n?", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """The sandbox of a unit and its drop-ins, given as texts in systemd's order. `resolve` resolves links as the host does."""

    texts: Sequence[str]
    resolve: Callable[[Path], Path] = Path.resolve

    def hiding(self, path: Path) -> str | None:
        """The directive that hides the path, or what it links to; None if it is visible."""
        last = dict(self._assignments())
        for directive, places in _HIDING.items():
            shown = last.get(directive, "no").lower() in _VISIBLE
            if not shown and any(_below(each, places) for each in (path, self.resolve(path))):
                return directive
        return None

    def read_only(self, settings: Settings) -> dict[Path, str]:
        """Folders that the agent must write and cannot, with the setting of each."""
        writable = tuple(self._writable())
        folders: dict[Path, str] = {}
        for key, folder in (*lasting(settings), *_passing(settings)):
            if not _below(_modern(self.resolve(folder)), writable):
                folders.setdefault(folder, key)
        return folders

    def open_pods(self, settings: Settings) -> list[Path]:
        """The folder of pods' volumes, if the kubelet's folder is not the one for which the unit hides them."""
        root = settings.kubelet.device_plugin_dir.parent
        pods, closed = root / "pods", self._listed("InaccessiblePaths")
        known = root == _ROOT or any(_below(each, closed) for each in (pods, self.resolve(pods)))
        return [] if known else [pods]

    def lacking(self, settings: Settings) -> tuple[str, ...]:
        """Directives that permit loading the driver's modules, if the settings need it and the unit forbids it."""
        closed = dict(self._assignments()).get("ProtectKernelModules", "no").lower() not in _NO
        return _LOADING if settings.nvml.load_kernel_modules and closed else ()

    def advice(self, settings: Settings, config: Path) -> list[str]:
        """A sentence for each path of the settings that is hidden, or that no drop-in may permit."""
        sentences = [
            f"move {path}, which the unit hides from the agent, and set {key} in {config}; or let the agent see it: `systemctl edit "
            f"gpumgr`, with the lines [Service] and {directive}={_SHOWING[directive]}"
            for key, path in _paths(settings)
            if (directive := self.hiding(path)) is not None
        ]
        bare = self.read_only(settings).get(_ROOT)
        return (
            [*sentences, f"set {bare} in {config} to a path in a folder of its own: the unit keeps / read-only"]
            if bare
            else sentences
        )

    def _writable(self) -> Iterator[str]:
        yield from self._listed("ReadWritePaths")
        for directive, place in _OWN_FOLDERS.items():
            yield from (f"{place}/{each}" for each in self._listed(directive))

    def _listed(self, directive: str) -> list[str]:
        """The effective values of a list directive: an empty value resets it. Source: systemd.unit(5)."""
        words: list[str] = []
        for name, value in self._assignments():
            if name == directive:
                words = [*words, *value.split()] if value else []
        return [each.strip('"').removeprefix("-") for each in words]

    def _assignments(self) -> Iterator[tuple[str, str]]:
        """A backslash continues a line, past comments, too. Source: systemd.syntax(7)."""
        for line in _COMMENT.sub("", "\n".join(self.texts)).replace("\\\n", " ").split("\n"):
            name, equals, value = line.partition("=")
            if equals:
                yield name.strip(), value.strip()


def drop_in(folders: Mapping[Path, str], hidden: Sequence[Path] = (), loading: Sequence[str] = ()) -> str:
    """A drop-in that lets the agent write these folders (each with its setting), has them made before it starts, and hides others;
    `loading` are directives for nvml.load_kernel_modules.

    "" if there is nothing to say. Raises InputError for a folder that no unit can name.
    """
    wanted = {folder: key for folder, key in folders.items() if folder != _ROOT}
    if not (wanted or hidden or loading):
        return ""
    lines = [f"{MARK}: what the settings need and the unit does not allow.", "# Do that again when the settings change."]
    if wanted:
        lines += ["[Unit]", *(f"RequiresMountsFor={quoted(str(folder), key)}" for folder, key in wanted.items()), ""]
    lines += ["[Service]"]
    for folder, key in wanted.items():
        # A folder that is missing when a process starts stays read-only for it; mkdir runs before the agent, outside the sandbox. The
        # minus signs let the agent report a folder that cannot be created.
        made = quoted(str(folder).replace("$", "$$"), key)
        mkdir = "/usr/bin/mkdir --mode=0700 --parents" if key == _LEDGER else "/usr/bin/mkdir --parents"
        lines += [f"# {key}", f"ReadWritePaths={quoted(f'-{folder}', key)}", f"ExecStartPre=-+{mkdir} {made}"]
    for folder in hidden:
        lines += ["# Pods' volumes.", f"InaccessiblePaths={quoted(f'-{folder}', _PLUGINS)}"]
    if loading:
        lines += ["# nvml.load_kernel_modules", *loading]
    return "\n".join([*lines, ""])


def quoted(word: str, what: str) -> str:
    """A word of a unit's command line or list. Source: systemd.service(5), "Command lines"; systemd.unit(5), "Specifiers".

    Raises InputError, which names `what` it is, for characters that systemd does not accept: a newline would begin another directive.
    """
    if any(unicodedata.category(each) in {"Cc", "Cs"} for each in word):
        raise InputError(
            f"{what} is {word!r}: no unit can name a path with control characters, or one that is not UTF-8; choose another"
        )
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return word if _PLAIN.fullmatch(word) else f'"{escaped}"'


def lasting(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Setting -> folder, of persistent files."""
    yield from written(settings)
    if (
        settings.vcuda.library_path is not None or settings.container.driver_files != "toolkit"
    ):  # the agent copies the driver's files
        yield "container.driver_share_dir", settings.container.driver_share_dir.parent
        yield "container.driver_whole_dir", settings.container.driver_whole_dir.parent


def _passing(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Setting -> folder, of its sockets."""
    # The kubelet's whole folder: a mount of device-plugins would stay the old one when `kubeadm reset` creates it again.
    yield _PLUGINS, settings.kubelet.device_plugin_dir.parent
    yield "http.socket", settings.http.socket.parent
    if settings.display.enabled:
        yield "display.socket", settings.display.socket.parent


def _paths(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Every path in the settings, with its setting."""
    for section, keys in plain(settings).items():
        if section == "kubernetes" and not settings.kubernetes.enabled:
            continue
        for key, value in keys.items():
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, str) and each.startswith("/"):
                    yield f"{section}.{key}", Path(each)


def _below(path: Path, places: Iterable[str]) -> bool:
    return any(path.is_relative_to(place) for place in places)


def _modern(path: Path) -> Path:
    """/var/run is /run under systemd, also in an image without that link."""
    return Path("/run") / path.relative_to("/var/run") if path.is_relative_to("/var/run") else path
