"""Checks the files and the address of the web server as the agent would use them."""

import errno
import socket
from pathlib import Path
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, aside, error_of, ok
from gpumgr.common.errors import SettingsError
from gpumgr.settings.schema import HttpSettings
from gpumgr.web.credentials import Certificates, TokenFile
from gpumgr.web.listening import ListenError, listen_tcp

IF_HUNG: Final = (
    "check whether the name in http.address can be resolved, and whether the file systems of the http section's files answer"
)


async def look_at_http(http: HttpSettings) -> CheckResult:
    """Reports what the agent itself would report: it uses the agent's readers of these files and its function to listen.

    The check of an address binds it for an instant. An agent that starts in that instant ends with code 2 and is started again.
    """
    try:
        await aside(lambda: _read(http))
    except SettingsError as exception:
        return error_of(exception, "look at http in the settings")
    place = f"{http.address}:{http.port}" if http.port else f"any port of {http.address}"
    scheme = "HTTPS" if http.tls_cert_file is not None else "HTTP"
    try:
        listeners = await listen_tcp(http.address, http.port)
    except ListenError as exception:
        in_use = getattr(exception.__cause__, "errno", None) == errno.EADDRINUSE
        if in_use and await aside(lambda: _answered(http.socket)):
            return ok(f"{place} is in use, probably by the agent that answers at {http.socket} ({scheme})")
        return error_of(exception, "set http.address and http.port")
    for listener in listeners:
        listener.close()
    return ok(f"{place} is free for {scheme}")


def _read(http: HttpSettings) -> None:
    """Raises SettingsError."""
    if http.token_file is not None:
        TokenFile(http.token_file)
    Certificates.of(http.tls_cert_file, http.tls_key_file, http.client_ca_file)


def _answered(path: Path) -> bool:
    """Whether a process serves that unix socket. If the check has no permission to connect, an existing socket counts as served."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except (BlockingIOError, PermissionError):  # BlockingIOError: the backlog is full, so a process listens
            return True
        except OSError:
            return False
    return True
