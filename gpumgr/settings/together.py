"""What is wrong with values that each are allowed: those that need one another, and those that the kernel would not take. Pure."""

import os
from collections.abc import Iterator, Sequence
from typing import Final

from gpumgr import tls_files
from gpumgr.settings.schema import Settings

#: sun_path of Linux's sockaddr_un, less the closing NUL.
_MAX_SOCKET_PATH_BYTES: Final = 107
#: Longest name of a socket that we make in the device plugins' folder, with its slash.
_OUR_SOCKET_BYTES: Final = 24


def contradictions(settings: Settings) -> Iterator[tuple[str, str]]:
    """(dotted key, message) of each mistake. A key with its default is never to blame."""
    yield from _socket_paths(settings)
    http = settings.http
    if (found := tls_files.misfit(http.tls_cert_file, http.tls_key_file, http.client_ca_file)) is not None:
        yield found
    yield from _twice("kubernetes.node_labels", settings.kubernetes.node_labels)
    yield from _twice("enforcement.overrides", settings.enforcement.overrides)


def _socket_paths(settings: Settings) -> Iterator[tuple[str, str]]:
    kubelet = settings.kubelet
    for key, path, limit in (
        ("kubelet.device_plugin_dir", kubelet.device_plugin_dir, _MAX_SOCKET_PATH_BYTES - _OUR_SOCKET_BYTES),
        ("kubelet.pod_resources_socket", kubelet.pod_resources_socket, _MAX_SOCKET_PATH_BYTES),
        ("http.socket", settings.http.socket, _MAX_SOCKET_PATH_BYTES),
        ("display.socket", settings.display.socket, _MAX_SOCKET_PATH_BYTES),
    ):
        if (length := len(os.fsencode(path))) > limit:
            yield key, f"the path has {length} bytes; allowed: {limit}, since unix sockets can't have longer names"


def _twice(key: str, items: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Of a list of name=value, in which the later one would count without a word."""
    names = [item.partition("=")[0] for item in dict.fromkeys(items)]
    for name in dict.fromkeys(each for each in names if names.count(each) > 1):
        yield key, f"{name!r} stands there with {names.count(name)} values; allowed: one"
