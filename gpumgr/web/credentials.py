"""The credential files of the web server: bearer token, certificate and key, CA of the clients.

Changed files are read again at each use until they can be read. Until then no token is valid, because an operator revokes the token by
removing its file. But the earlier certificates stay in use, because certificate and key are replaced one after the other. Each reason of a
failure is logged once.
"""

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import structlog

from gpumgr.common.aio import DaemonCalls
from gpumgr.common.errors import SettingsError
from gpumgr.common.files import FileIdentity, read_bounded
from gpumgr.settings.schema import missing_file

_log = structlog.get_logger(__name__)

_MOST_TOKEN_BYTES: Final = 16 * 1024
_MOST_PEM_BYTES: Final = 1 << 20
#: How long a request or handshake waits for the files' check. While a check hangs, later requests do not wait.
LOOK_SECONDS: Final = 2.0

T = TypeVar("T")

#: Changes when a file is written or replaced.
_Stamp = tuple[FileIdentity | None, ...]


class _Files(ABC, Generic[T]):
    """The value that `_make` makes from the files. When the files have changed, `_make` is called again, on a thread, because a file system
    may hang."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._calls = DaemonCalls("web-credentials")
        self._looking: asyncio.Task[None] | None = None
        #: None if the files could not be used at the last check. `_error` is the reason.
        self._stamp: _Stamp | None = _stamp(*paths)
        self._error: str | None = None
        self._value = self._make()

    @abstractmethod
    def _make(self) -> T:
        """Reads the files. Raises SettingsError."""

    @abstractmethod
    def _report(self, error: SettingsError | None) -> T:
        """Logs that changed files were read (None), or the error. Returns the value to use after an error."""

    async def current(self) -> T:
        """Returns within LOOK_SECONDS. Simultaneous calls wait for one check of the files."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="web_credentials")
        await asyncio.shield(self._looking)
        return self._value

    async def _look(self) -> None:
        before = self._stamp
        try:
            found = await self._calls.call(lambda: self._changed(before), timeout_seconds=LOOK_SECONDS)
        except TimeoutError:
            paths = " and ".join(map(str, self._paths))
            found = None, SettingsError(f"{paths} can't be read: the file system does not answer")
        if found is None:
            return
        self._stamp, made = found
        if not isinstance(made, SettingsError):
            self._value, self._error = made, None
            self._report(None)
        elif str(made) != self._error:
            self._error, self._value = str(made), self._report(made)

    def _changed(self, before: _Stamp | None) -> tuple[_Stamp | None, T | SettingsError] | None:
        """Returns the files' stamp with the new value or the error, or None if the files have not changed. Runs on the thread.

        After an error the stamp is None, so that the next check reads the files again: a file system may recover without a change of the
        files.
        """
        if (stamp := _stamp(*self._paths)) == before:
            return None
        try:
            return stamp, self._make()
        except SettingsError as error:
            return None, error


class TokenFile(_Files[bytes | None]):
    """`current` returns the token; None if the file can't be used now. The constructor raises SettingsError if the file has no token."""

    def _make(self) -> bytes:
        return _read_token(*self._paths)

    def _report(self, error: SettingsError | None) -> bytes | None:
        if error is None:
            _log.info("token_read_again", path=str(self._paths[0]))
        else:
            _log.error("token_unusable", error=str(error), consequence="no token is accepted until the file can be used")
        return None


class Certificates(_Files[ssl.SSLContext]):
    """`current` returns the TLS context for the next connection. `section`: the settings' section that names the files.

    With `client_ca_file` clients may present a certificate, with `clients_required` they must. The constructor raises SettingsError.
    """

    def __init__(
        self,
        cert_file: Path,
        key_file: Path,
        client_ca_file: Path | None,
        *,
        section: str = "http",
        clients_required: bool = False,
    ) -> None:
        self._names = (cert_file, key_file, client_ca_file)
        self._section, self.clients_required = section, clients_required
        super().__init__(*(file for file in self._names if file is not None))

    @classmethod
    def of(cls, cert_file: Path | None, key_file: Path | None, client_ca_file: Path | None) -> "Certificates | None":
        """None if no certificate is set, which means plain HTTP. Raises SettingsError if only one file of a pair is set."""
        if (found := missing_file("http", cert_file, key_file, client_ca_file)) is not None:
            raise SettingsError(" ".join(found))
        if cert_file is None or key_file is None:
            return None
        return cls(cert_file, key_file, client_ca_file)

    def _make(self) -> ssl.SSLContext:
        context = _context(self._section, *self._names)
        if self.clients_required:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _report(self, error: SettingsError | None) -> ssl.SSLContext:
        if error is None:
            _log.info("certificates_read_again", path=str(self._names[0]))
        else:
            _log.error("certificates_unusable", error=str(error), consequence="the earlier certificates stay in use")
        return self._value


def certificate_names(certificate: Mapping[str, Any] | None) -> set[str]:
    """The common names and DNS names of a certificate as ssl.SSLSocket.getpeercert returns it."""
    found = certificate or {}
    common = {value for part in found.get("subject", ()) for key, value in part if key == "commonName"}
    return common | {value for key, value in found.get("subjectAltName", ()) if key == "DNS"}


def _stamp(*paths: Path) -> _Stamp:
    return tuple(map(FileIdentity.at, paths))


def _read(key: str, path: Path, most_bytes: int) -> bytes:
    """Raises SettingsError."""
    try:
        return read_bounded(path, most_bytes)
    except OSError as error:
        raise SettingsError(
            f"{key} {path} can't be read: {error.strerror or error}; name a file that the agent may read, or set {key} to null"
        ) from error


def _read_token(path: Path) -> bytes:
    token = _read("http.token_file", path, _MOST_TOKEN_BYTES).strip()
    if not token:
        raise SettingsError(
            f"http.token_file {path} is empty; write a token into it (`openssl rand -hex 32`), or set http.token_file to null"
        )
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise SettingsError(
            f"http.token_file {path} must have one line of visible ASCII characters without spaces (`openssl rand -hex 32`)"
        )
    return token


def _context(section: str, cert_file: Path, key_file: Path, client_ca_file: Path | None) -> ssl.SSLContext:
    """TLS 1.2 and later. Raises SettingsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    certificate = _read(f"{section}.tls_cert_file", cert_file, _MOST_PEM_BYTES)
    if b"-----BEGIN CERTIFICATE-----" not in certificate:
        raise SettingsError(f"{section}.tls_cert_file {cert_file} has no certificate in PEM (-----BEGIN CERTIFICATE-----)")
    if b"PRIVATE KEY-----" not in _read(f"{section}.tls_key_file", key_file, _MOST_PEM_BYTES):
        raise SettingsError(f"{section}.tls_key_file {key_file} has no private key in PEM (-----BEGIN PRIVATE KEY-----)")

    def no_passphrase() -> str:
        raise SettingsError(
            f"{section}.tls_key_file {key_file} is encrypted; write the key without a passphrase (`openssl pkey`)"
        )

    try:
        context.load_cert_chain(cert_file, key_file, no_passphrase)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{section}.tls_cert_file {cert_file} and {section}.tls_key_file {key_file} can't be used: {_why(error)}; look at both with "
            "`openssl x509` and `openssl pkey`"
        ) from error
    if client_ca_file is not None:
        _trust(section, context, client_ca_file)
    return context


def _trust(section: str, context: ssl.SSLContext, client_ca_file: Path) -> None:
    """Client certificates stay optional. If a client presents a certificate that this CA did not sign, the handshake fails."""
    authorities = _read(f"{section}.client_ca_file", client_ca_file, _MOST_PEM_BYTES)
    try:
        context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{section}.client_ca_file {client_ca_file} can't be used: {_why(error)}; it needs certificates in PEM "
            "(-----BEGIN CERTIFICATE-----)"
        ) from error
    context.verify_mode = ssl.CERT_OPTIONAL


def _why(error: Exception) -> str:
    """OpenSSL's reason without the position in its source."""
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else str(error)
