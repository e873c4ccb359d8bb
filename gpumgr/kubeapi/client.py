"""Connection to the API server: credentials, requests, and detection of a dead peer."""

import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

import aiohttp
import msgspec
import yaml

from gpumgr.errors import GpumgrError, SettingsError
from gpumgr.kubeapi.library import load_library

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
#: JSON merge patch (RFC 7386), Kubernetes' strategic merge patch, which merges some lists by key, or JSON patch (RFC 6902), a list of
#: operations.
PatchKind = Literal["merge", "strategic", "json"]
Body = Mapping[str, Any] | Sequence[Mapping[str, Any]]

_CONTENT_TYPES: Final[Mapping[PatchKind, str]] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}

#: The remedy for credentials that are missing or wrong, where the agent's settings name them.
_SET_IT: Final = (
    "set kubernetes.kubeconfig to an existing kubeconfig file, or kubernetes.enabled to false (--standalone) for a node without "
    "API server"
)
#: Errors of the library for a malformed kubeconfig; their texts explain nothing.
_MALFORMED: Final = (TypeError, KeyError, AttributeError, AssertionError)

#: What a request raises: no answer (a TimeoutError is an OSError), a refusal, credentials that can't be used.
API_FAILURES: Final = (GpumgrError, aiohttp.ClientError, OSError)
#: What reading an object of the API server raises if it has another structure.
UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError)
REQUEST_TIMEOUT: Final = aiohttp.ClientTimeout(total=60, sock_connect=10)
#: The API server itself tries for ten seconds before it refuses an eviction because of the UID.
_WRITE_TIMEOUT: Final = aiohttp.ClientTimeout(total=30, sock_connect=5)

#: A peer that vanished without closing the connection (power, network) is detected after about half a minute.
_TCP_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


class ApiServer:
    """Requests to the API server. Created by `connect` inside a running event loop; `close` at the end."""

    def __init__(self, kubeconfig: Path | None, client: Any, remedy: str) -> None:
        self._kubeconfig = kubeconfig
        self._client = client
        self._remedy = remedy

    @classmethod
    async def connect(cls, kubeconfig: Path | None, *, remedy: str = _SET_IT) -> Self:
        """Uses a kubeconfig file, or (None) the service account of the pod that the agent runs in. Sends nothing yet.

        Raises SettingsError with `remedy` at the end of the message if the credentials are missing or can't be read.
        """
        return cls(kubeconfig, await _make_client(kubeconfig, remedy), remedy)

    async def close(self) -> None:
        await self._client.close()

    async def renew(self) -> None:
        """Reads the credentials again: kubeconfig files and their certificates are replaced in place. Raises SettingsError."""
        old, self._client = self._client, await _make_client(self._kubeconfig, self._remedy)
        await old.close()

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
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends one request; the body of the answer is not read, nor its status checked. `patch` is the type of a PATCH; `headers` are
        sent besides the usual ones.

        Raises aiohttp.ClientError, TimeoutError or OSError if there is no answer, SettingsError if the credentials (a token file is
        read again every minute) have become invalid.
        """
        sent = {"Accept": "application/json", **(headers or {})}
        if method == "PATCH":
            sent["Content-Type"] = _CONTENT_TYPES[patch]
        try:
            response: aiohttp.ClientResponse = await self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params=sent,
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=timeout,
            )
        except (load_library().ConfigException, ValueError) as error:
            raise SettingsError(f"the credentials for the API server can't be used: {error}") from error
        async with response:
            _detect_dead_peer(response)
            yield response

    async def send(self, method: Method, path: str, body: Body, *, but: Collection[int] = (), patch: PatchKind = "merge") -> bool:
        """Sends one request and checks only the status of the answer. False if that is one of `but`.

        Raises AnswerError for any other refusal, and what `request` raises.
        """
        async with self.request(method, path, {}, _WRITE_TIMEOUT, body, patch) as response:
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
                return msgspec.json.decode(await response.read(), type=dict[str, Any])
            except ValueError as error:  # msgspec's own errors, and that of bytes which are no text
                raise AnswerError(f"the API server's answer is no JSON object: {error}", status=response.status) from error

    async def find(self, path: str, *, query: Mapping[str, str] = {}) -> dict[str, Any] | None:
        """As `read`; None: there is no such object (HTTP 404)."""
        try:
            return await self.read("GET", path, query=query)
        except AnswerError as error:
            if error.status != 404:
                raise
            return None


class AnswerError(GpumgrError):
    """The server answered with an error. `retry_after_seconds` is its Retry-After, or 0.0; `causes` are the reasons in the Status'
    details, such as "NamespaceTerminating"."""

    def __init__(
        self, message: str, *, status: int = 0, retry_after_seconds: float = 0.0, causes: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.causes = causes


class _Cause(msgspec.Struct):
    reason: str = ""


class _Details(msgspec.Struct):
    causes: tuple[_Cause, ...] = ()


class _Status(msgspec.Struct):
    """The fields of metav1.Status that explain an error."""

    message: str
    details: _Details | None = None


async def answer_error(response: aiohttp.ClientResponse) -> AnswerError:
    """The error in an answer. Reads the beginning of its body; raises what reading raises."""
    body = await response.content.read(4096)
    try:
        status = msgspec.json.decode(body, type=_Status)
    except ValueError:  # from a proxy, or longer than what is read
        status = _Status(message=body.decode(errors="replace"))
    wanted = response.headers.get("Retry-After", "")
    return AnswerError(
        f"HTTP {response.status}: {' '.join(status.message.split())[:300]}",
        status=response.status,
        retry_after_seconds=float(wanted) if wanted.isascii() and wanted.isdigit() else 0.0,
        causes=frozenset(cause.reason for cause in status.details.causes) if status.details else frozenset(),
    )


async def _make_client(kubeconfig: Path | None, remedy: str) -> Any:
    library = load_library()
    configuration = library.Configuration()
    try:
        if kubeconfig is None:
            library.load_incluster_config(client_configuration=configuration)
        else:
            _check(kubeconfig)
            await library.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration, persist_config=False)
        client = library.ApiClient(configuration)
    except (library.ConfigException, yaml.YAMLError, OSError, ValueError, *_MALFORMED) as error:
        # For malformed files the loader raises various errors, and ssl for their certificates.
        place = f"kubeconfig {kubeconfig}" if kubeconfig else "pod's service account (kubernetes.kubeconfig is not set)"
        raise SettingsError(f"the {place} can't be used: {_message(error, kubeconfig)}; {remedy}") from error
    client.user_agent = "gpumgr"
    return client


def _check(kubeconfig: Path) -> None:
    """Checks what the library does not: it treats a missing file as an empty one, with a warning in the log.

    Raises OSError, ValueError or YAMLError.
    """
    if ":" in str(kubeconfig):
        raise ValueError("a path with a colon means several paths")
    if not stat.S_ISREG(os.stat(kubeconfig).st_mode):
        raise ValueError("it is not a regular file")
    with kubeconfig.open("rb") as file:  # given a text, PyYAML quotes its lines in errors, and secrets with them
        content = yaml.safe_load(file)
    if not isinstance(content, dict):
        raise ValueError("it is not a kubeconfig (kind: Config, with clusters, users, contexts and current-context)")


def _message(error: Exception, kubeconfig: Path | None) -> str:
    """The error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename in (None, str(kubeconfig)) else f"{error.filename}: {error.strerror}"
    if isinstance(error, yaml.YAMLError):
        return f"it is not YAML ({' '.join(str(error).split())})"
    if isinstance(error, _MALFORMED):
        return "it does not have the structure of a kubeconfig"
    return " ".join(str(error).split()).rstrip(".")


def _detect_dead_peer(response: aiohttp.ClientResponse) -> None:
    """Does nothing if the connection is released already, which is so when the whole answer came in one piece."""
    transport = response.connection.transport if response.connection else None
    sock = transport.get_extra_info("socket") if transport else None
    if sock is None:
        return
    with contextlib.suppress(OSError):
        for level, option, value in _TCP_OPTIONS:
            sock.setsockopt(level, option, value)
