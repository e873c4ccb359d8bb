"""The connection to the API server: requests, their errors, and renewal of credentials."""

import asyncio
import contextlib
import json
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

import aiohttp
import msgspec
import structlog

from gpumgr.common.aio import run_shielded
from gpumgr.common.errors import GpumgrError, SettingsError
from gpumgr.common.foreign_text import UnreadableText, convert, decode_answer, decode_json
from gpumgr.kube.credentials import CredentialFiles, Credentials

_log = structlog.get_logger(__name__)

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
#: merge: JSON merge patch (RFC 7386). strategic: Kubernetes' strategic merge patch, which merges some lists by key. json: JSON patch (RFC
#: 6902), a list of operations.
PatchKind = Literal["merge", "strategic", "json"]
Body = Mapping[str, Any] | Sequence[Mapping[str, Any]]

_CONTENT_TYPES: Final[Mapping[PatchKind, str]] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}

_SET_IT: Final = (
    "set kubernetes.kubeconfig to an existing kubeconfig file, or kubernetes.enabled to false (--standalone) for a node without "
    "API server"
)
#: What a request raises: no answer (a TimeoutError is an OSError), a refusal, or unusable credentials.
API_FAILURES: Final = (GpumgrError, aiohttp.ClientError, OSError)
#: What decoding raises for an API object of another structure, or one that is nested too deeply.
UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
REQUEST_TIMEOUT: Final = aiohttp.ClientTimeout(total=60, sock_connect=10)
#: For `send` and `read`. The API server refuses an eviction with a wrong UID after ten seconds.
_WRITE_TIMEOUT: Final = aiohttp.ClientTimeout(total=30, sock_connect=5)
#: The shortest time between two reads of refused credentials, because a read may run a program.
_RENEW_SECONDS: Final = 5.0
MAX_RETRY_AFTER_SECONDS: Final = 120.0

#: These options detect a peer that vanished without closing the connection (power, network) within about half a minute.
_TCP_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    for level, option, value in _TCP_OPTIONS:
        made.setsockopt(level, option, value)
    return made


class ApiServer:
    """Create it with `connect` inside a running event loop, and call `close` at the end."""

    def __init__(
        self,
        files: CredentialFiles,
        credentials: Credentials,
        clock: Callable[[], float] = time.monotonic,
        max_retry_after_seconds: float = MAX_RETRY_AFTER_SECONDS,
    ) -> None:
        self._files, self._clock, self._max_retry_after_seconds = files, clock, max_retry_after_seconds
        self._credentials = credentials
        # Watch events are long lines. With the default buffer, reading would pause at each of them.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=100, socket_factory=_socket), read_bufsize=1 << 21
        )
        #: Whether the API server has refused the credentials with 401.
        self._refused = False
        self._renewing = asyncio.Lock()
        self._renewal_due = -math.inf
        #: (Method, path, name in the body) of a write that was refused with Retry-After -> when it may be sent again, and the status. Many
        #: objects share the path of a POST, so the name is needed.
        self._held: dict[tuple[Method, str, str], tuple[float, int]] = {}
        #: Why the last renewal failed; None if it succeeded.
        self._unreadable: SettingsError | None = None

    @classmethod
    async def connect(
        cls,
        kubeconfig: Path | None,
        *,
        remedy: str = _SET_IT,
        clock: Callable[[], float] = time.monotonic,
        max_retry_after_seconds: float = MAX_RETRY_AFTER_SECONDS,
    ) -> Self:
        """Reads the credentials. `kubeconfig`: None for the service account of the pod. `max_retry_after_seconds` limits each Retry-After.

        Raises SettingsError, which ends with `remedy`, if the credentials are missing or can't be read.
        """
        files = CredentialFiles(kubeconfig, remedy)
        return cls(files, await files.read(), clock, max_retry_after_seconds)

    @classmethod
    @contextlib.asynccontextmanager
    async def session(cls, kubeconfig: Path | None, *, remedy: str = _SET_IT) -> AsyncIterator[Self]:
        """A connection for the block. Converts connection errors and UNREADABLE from the block to GpumgrError."""
        server = await cls.connect(kubeconfig, remedy=remedy)
        place = "the API server" + (f" of {kubeconfig}" if kubeconfig else "")
        try:
            yield server
        except (aiohttp.ClientError, OSError) as error:
            raise GpumgrError(f"{place} did not answer: {' '.join(str(error).split()) or type(error).__name__}") from error
        except UNREADABLE as error:
            raise GpumgrError(f"the answer of {place} has another structure: {unreadable_text(error)}") from error
        finally:
            await server.close()

    async def close(self) -> None:
        await self._session.close()

    async def _renew(self) -> None:
        """Reads the credentials again after a 401, because kubeconfig files and certificates are replaced in place. All callers wait for
        one renewal. If it fails, the earlier credentials stay in use until a later call succeeds."""
        async with self._renewing:
            if not self._refused or self._clock() < self._renewal_due:
                return
            self._renewal_due = self._clock() + _RENEW_SECONDS
            try:
                self._credentials, self._unreadable = await self._files.read(), None
                self._refused = False
            except SettingsError as error:
                if str(error) != str(self._unreadable):
                    _log.warning("credentials_not_renewed", error=str(error))
                self._unreadable = error

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: Method,
        path: str,
        query: Mapping[str, str],
        timeout: aiohttp.ClientTimeout = REQUEST_TIMEOUT,
        body: Body | None = None,
        patch: PatchKind = "merge",
        headers: Mapping[str, str] | None = None,
        check: Callable[[], None] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends one request, but neither reads the answer's body nor checks its status. The first request after a 401 reads the credentials
        again, at most every _RENEW_SECONDS. A write that was refused with Retry-After is not sent again before that time.

        `check` is called on the open connection, immediately before the body is sent. If it raises, the body is not sent, and the error is
        the cause of an aiohttp.ClientConnectionError.

        Raises API_FAILURES: an AnswerError if the write must wait, or if the credentials can't be read after a 401.
        """
        write = method, path, _name(body)
        self._check_held(write)
        sent = {"Accept": "application/json", "User-Agent": "gpumgr", **(headers or {})}
        if body is not None:
            sent["Content-Type"] = _CONTENT_TYPES[patch] if method == "PATCH" else "application/json"
        data = json.dumps(body).encode() if body is not None else None
        checked = _checked(data, check) if data is not None and check is not None else data
        if self._refused:
            await run_shielded(self._renew(), name="renewal")  # the renewal may take longer than this caller waits
        credentials = self._credentials
        async with await self._send(
            method, path, credentials, params=query, headers=sent, data=checked, timeout=timeout
        ) as response:
            if response.status == 401 and credentials is self._credentials:
                self._refused = True
            if response.status == 401 and self._unreadable is not None:
                raise AnswerError(f"HTTP 401, and new credentials can't be read: {self._unreadable}", status=401)
            if method != "GET" and response.status >= 300 and (seconds := _retry_after(response)) > 0:
                self._hold(write, seconds, response.status)
            yield response

    def _hold(self, write: tuple[Method, str, str], seconds: float, status: int) -> None:
        now = self._clock()
        self._held = {key: held for key, held in self._held.items() if held[0] > now}
        self._held[write] = now + min(seconds, self._max_retry_after_seconds), status

    def _check_held(self, write: tuple[Method, str, str]) -> None:
        until, status = self._held.get(write, (-math.inf, 0))
        if (left := until - self._clock()) > 0:
            raise AnswerError(f"HTTP {status}: too early for another try", status=status, retry_after_seconds=left)
        self._held.pop(write, None)

    async def _send(
        self, method: Method, path: str, credentials: Credentials, *, headers: Mapping[str, str], **options: Any
    ) -> aiohttp.ClientResponse:
        """Renewed certificates get new connections, because aiohttp keeps connections by TLS context. Raises what `request` raises."""
        await self._files.refresh(credentials)
        try:
            return await self._session.request(
                method,
                credentials.host + path,
                headers={**headers, **credentials.headers()},
                proxy=credentials.proxy,
                ssl=credentials.context or True,
                server_hostname=credentials.tls_server_name,
                **options,
            )
        except (aiohttp.ClientError, OSError):
            raise
        except Exception as error:  # an error of the HTTP client must not end the callers
            raise GpumgrError(f"the request to the API server failed: {type(error).__name__}: {error}") from error

    async def send(
        self,
        method: Method,
        path: str,
        body: Body,
        *,
        but: Collection[int] = (),
        patch: PatchKind = "merge",
        check: Callable[[], None] | None = None,
    ) -> bool:
        """Sends one request and checks the status of the answer. Returns False if the status is in `but`. `check`: see `request`.

        Raises AnswerError for any other refusal, and what `request` raises.
        """
        async with self.request(method, path, {}, _WRITE_TIMEOUT, body, patch, check=check) as response:
            if response.status in but:
                return False
            if response.status >= 300:
                raise await answer_error(response)
        return True

    async def read(
        self, method: Method, path: str, body: Mapping[str, Any] | None = None, *, query: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        """The object in the answer. Raises AnswerError for a refusal or an answer that is no JSON object, and what `request` raises."""
        async with self.request(method, path, query, _WRITE_TIMEOUT, body) as response:
            if response.status >= 300:
                raise await answer_error(response)
            try:
                return await decode_answer(await response.read(), dict[str, Any])
            except UnreadableText as error:
                raise AnswerError(f"the API server's answer is no JSON object: {error}", status=response.status) from error

    async def find(self, path: str, *, query: Mapping[str, str] = {}) -> dict[str, Any] | None:
        """As `read`; None for HTTP 404."""
        try:
            return await self.read("GET", path, query=query)
        except AnswerError as error:
            if error.status != 404:
                raise
            return None


class _List(msgspec.Struct):
    items: list[Any] | None


def items_of(answer: object) -> list[Any]:
    """The unchecked items of a Kubernetes list; [] for null, which Go writes for an empty list. Raises WrongStructure."""
    return convert(answer, _List).items or []


def failure_text(error: BaseException) -> str:
    """`error` is one of API_FAILURES or UNREADABLE."""
    return str(error) if isinstance(error, GpumgrError) else f"{type(error).__name__}: {error}".removesuffix(": ")


def unreadable_text(error: Exception) -> str:
    """`error` is one of UNREADABLE. The text has one line."""
    return str(UnreadableText(error if isinstance(error, ValueError | RecursionError) else f"{type(error).__name__}: {error}"))


def _name(body: Body | None) -> str:
    return str((body.get("metadata") or {}).get("name") or "") if isinstance(body, Mapping) else ""


async def _checked(data: bytes, check: Callable[[], None]) -> AsyncIterator[bytes]:
    check()
    yield data


class AnswerError(GpumgrError):
    """`retry_after_seconds` is 0.0 if the answer has no Retry-After."""

    def __init__(self, message: str, *, status: int = 0, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class _Status(msgspec.Struct):
    message: str


async def answer_error(response: aiohttp.ClientResponse) -> AnswerError:
    """The error in the answer. Raises what the read of its body raises."""
    body = await response.content.read(4096)
    try:
        message = decode_json(body, _Status).message
    except UnreadableText:  # the answer of a proxy, or longer than what was read
        message = body.decode(errors="replace")
    return AnswerError(
        f"HTTP {response.status}: {' '.join(message.split())[:300]}",
        status=response.status,
        retry_after_seconds=_retry_after(response),
    )


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """In seconds; 0.0 if it is missing or a date."""
    wanted = response.headers.get("Retry-After", "")
    return float(wanted) if wanted.isascii() and wanted.isdigit() else 0.0
