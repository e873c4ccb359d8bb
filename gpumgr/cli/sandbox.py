"""What the unit's sandbox keeps from the agent: places that it hides, and folders of the settings that it would keep read-only."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumgr.doctor.folders import backend_words, written
from gpumgr.settings import Settings
from gpumgr.settings.schema import plain

#: How a drop-in of ours begins. Another file of its name is the operator's.
MARK: Final = "# Written by `gpumgr install systemd`"
_ROOT: Final = Path("/")
#: Directives that hide places, and what of them shows these again. Source: systemd.exec(5).
_HIDING: Final[Mapping[str, tuple[str, ...]]] = {
    "ProtectHome": ("/home", "/root", "/run/user"),
    "PrivateTmp": ("/tmp", "/var/tmp"),
}
_SHOWING: Final[Mapping[str, str]] = {"ProtectHome": "read-only", "PrivateTmp": "no"}
_VISIBLE: Final = frozenset({"no", "false", "off", "0", "n", "f", "read-only"})
#: Directives of folders that systemd makes and leaves writable, and where these are.
_OWN_FOLDERS: Final = {"StateDirectory": "/var/lib", "ConfigurationDirectory": "/etc", "RuntimeDirectory": "/run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Of a unit and its drop-ins: their texts in the order in which systemd reads them. `resolve` follows links as the host does."""

    texts: Sequence[str]
    resolve: Callable[[Path], Path] = Path.resolve

    def hiding(self, path: Path) -> str | None:
        """The directive because of which the service does not see the path, or what it links to; None if it sees it."""
        last = dict(self._assignments())
        for directive, places in _HIDING.items():
            shown = last.get(directive, "no").lower() in _VISIBLE
            if not shown and any(_below(each, places) for each in (path, self.resolve(path))):
                return directive
        return None

    def read_only(self, settings: Settings) -> dict[Path, str]:
        """Folders that the agent writes and may not -> the setting of each."""
        writable = tuple(self._writable())
        folders: dict[Path, str] = {}
        for key, folder in _all_written(settings):
            if not _below(_modern(self.resolve(folder)), writable):
                folders.setdefault(folder, key)
        return folders

    def advice(self, settings: Settings, config: Path) -> list[str]:
        """A sentence for each path of the settings that the service would not see, or that no drop-in may allow."""
        told = [
            f"move {path}, which the unit hides from the agent, and set {key} in {config}; or let the agent see it: `systemctl edit "
            f"gpumgr`, with the lines [Service] and {directive}={_SHOWING[directive]}"
            for key, path in _paths(settings)
            if (directive := self.hiding(path)) is not None
        ]
        bare = self.read_only(settings).get(_ROOT)
        return [*told, f"set {bare} in {config} to a path in a folder of its own: the unit keeps / read-only"] if bare else told

    def _writable(self) -> Iterator[str]:
        for name, value in self._assignments():
            if name == "ReadWritePaths":
                yield from (each.strip('"').removeprefix("-") for each in value.split())
            elif name in _OWN_FOLDERS:
                yield from (f"{_OWN_FOLDERS[name]}/{each}" for each in value.split())

    def _assignments(self) -> Iterator[tuple[str, str]]:
        for line in "\n".join(self.texts).splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith(("#", ";")):
                yield name.strip(), value.strip()


def drop_in(folders: Mapping[Path, str]) -> str:
    """A drop-in that lets the agent write these folders, and has them made before it starts; "" if there is nothing to allow."""
    wanted = {folder: key for folder, key in folders.items() if folder != _ROOT}
    if not wanted:
        return ""
    lines = [f"{MARK}: folders of the settings that the unit would keep read-only.", "# Do that again when the settings change."]
    lines += ["[Unit]", *(f"RequiresMountsFor={quoted(str(folder))}" for folder in wanted), "", "[Service]"]
    for folder, key in wanted.items():
        # A folder that is missing when a process starts stays read-only for it; mkdir runs before the agent, outside the sandbox. The
        # minus signs leave it to the agent to say what is wrong with a folder that can't be made.
        made = quoted(str(folder).replace("$", "$$"))
        lines += [f"# {key}", f"ReadWritePaths={quoted(f'-{folder}')}", f"ExecStartPre=-+/usr/bin/mkdir --parents {made}"]
    return "\n".join([*lines, ""])


def quoted(word: str) -> str:
    """A word of a unit's command line or list. Source: systemd.service(5), "Command lines"; systemd.unit(5), "Specifiers"."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if " " in word or escaped != word else word


def _all_written(settings: Settings) -> Iterator[tuple[str, Path]]:
    yield from written(settings)
    yield "kubelet.device_plugin_dir", settings.kubelet.device_plugin_dir
    yield "http.socket", settings.http.socket.parent
    if settings.display.enabled:
        yield "display.socket", settings.display.socket.parent
    if "vcuda" in backend_words(settings):
        yield "container.driver_share_dir", settings.container.driver_share_dir.parent
        yield "container.driver_whole_dir", settings.container.driver_whole_dir.parent


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
    """/var/run is /run wherever systemd runs, in an image that lacks the link too."""
    return Path("/run") / path.relative_to("/var/run") if path.is_relative_to("/var/run") else path
