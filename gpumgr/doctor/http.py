"""The web server, as the agent will start it: its files, and its address."""

import errno
import os
import socket
from pathlib import Path
from typing import Final

from gpumgr.doctor.examine import aside
from gpumgr.doctor.finding import Finding, error_of, ok
from gpumgr.errors import SettingsError
from gpumgr.settings.schema import HttpSettings
from gpumgr.web.door.credentials import Certificates, TokenFile
from gpumgr.web.door.listening import ListenError, listen_tcp

NAME: Final = "http"
IF_HUNG: Final = (
    "look whether the name in http.address can be resolved, and whether the file systems of the http section's files answer"
)
_AS_ROOT: Final = "run this as root, as the agent runs: another user can't tell what root may do"


async def look_at_http(http: HttpSettings) -> Finding:
    """What the agent itself would say: its own readers of the files are asked, and its own way to listen.

    To find out whether an address is free is to take it for an instant: an agent that starts in that very instant ends with code 2 and
    is started again.
    """
    try:
        await aside(lambda: _read(http))
    except SettingsError as exception:
        found = error_of(NAME, exception, f"look at {NAME} in the settings")
        by_root = os.geteuid() != 0 and isinstance(exception.__cause__, PermissionError)
        return Finding(check=NAME, state="error", message=found.message, remedy=_AS_ROOT) if by_root else found
    place = f"{http.address}:{http.port}" if http.port else f"any port of {http.address}"
    scheme = "HTTPS" if http.tls_cert_file is not None else "HTTP"
    try:
        listeners = await listen_tcp(http.address, http.port)
    except ListenError as exception:
        number = getattr(exception.__cause__, "errno", None)
        if number == errno.EADDRINUSE and await aside(lambda: _answered(http.socket)):
            return ok(NAME, f"the agent that answers at {http.socket} has {place}, or so it seems ({scheme})")
        if number == errno.EACCES and os.geteuid() != 0:
            return Finding(check=NAME, state="error", message=error_of(NAME, exception, _AS_ROOT).message, remedy=_AS_ROOT)
        return error_of(NAME, exception, "set http.address and http.port")
    for listener in listeners:
        listener.close()
    return ok(NAME, f"{place} is free for {scheme}")


def _read(http: HttpSettings) -> None:
    """Raises SettingsError."""
    if http.token_file is not None:
        TokenFile(http.token_file)
    Certificates.of(http.tls_cert_file, http.tls_key_file, http.client_ca_file)


def _answered(path: Path) -> bool:
    """Whether an agent serves that unix socket; who may not ask takes one that is there for an agent's."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except (BlockingIOError, PermissionError):  # the former: its backlog is full, so it listens
            return True
        except OSError:
            return False
    return True
