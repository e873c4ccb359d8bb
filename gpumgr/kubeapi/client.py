"""The API server as a connection: credentials, requests, and sockets that notice a dead peer."""

import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self

import aiohttp
import msgspec
import yaml

from gpumgr.errors import GpumgrError, SettingsError
from gpumgr.kubeapi.library import load_library

Method = Literal["GET", "POST", "PATCH", "DELETE"]
#: RFC 7386, or Kubernetes' own, which knows which lists are keyed by what.
PatchKind = Literal["merge", "strategic"]

#: What to do about credentials that are missing or wrong, where the agent's settings name them.
_SET_IT: Final = (
    "set kubernetes.kubeconfig to a kubeconfig file that is there, or kubernetes.enabled to false (--standalone) for a node without "
    "API server"
)
#: What the library says instead of a message, in words.
_NO_WORDS: Final = (TypeError, KeyError, AttributeError, AssertionError)

REQUEST_TIMEOUT: Final = aiohttp.ClientTimeout(total=60, sock_connect=10)

#: A peer that vanished without a word (power, network) is found dead after about half a minute, not after the watch's own end.
_TCP_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


class ApiServer:
    """Requests to the API server. Made by `connect` inside a running loop; `close` at the end."""

    def __init__(self, kubeconfig: Path | None, client: Any, remedy: str) -> None:
        self._kubeconfig = kubeconfig
        self._client = client
        self._remedy = remedy

    @classmethod
    async def connect(cls, kubeconfig: Path | None, *, remedy: str = _SET_IT) -> Self:
        """With a kubeconfig file, or (None) the service account of the pod around us. Sends nothing yet.

        Raises SettingsError if the credentials are missing or can't be read; `remedy` is what it says to do.
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
        body: Mapping[str, Any] | None = None,
        patch: PatchKind = "merge",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request; the answer's body is not read yet, and its status may be anything. `patch` says what the body of a PATCH is.

        Raises aiohttp.ClientError, TimeoutError or OSError when there is no answer, SettingsError if the credentials (a token file is
        read again every minute) have become unusable.
        """
        headers = {"Accept": "application/json"}
        if method == "PATCH":
            headers["Content-Type"] = f"application/{'merge' if patch == 'merge' else 'strategic-merge'}-patch+json"
        try:
            response: aiohttp.ClientResponse = await self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=timeout,
            )
        except (load_library().ConfigException, ValueError) as error:
            raise SettingsError(f"the credentials for the API server can't be used: {error}") from error
        async with response:
            _notice_dead_peer(response)
            yield response


class AnswerError(GpumgrError):
    """The server answered with an error. `retry_after_seconds` is what it asks for, 0.0 if nothing; `causes` are its words for why,
    such as "NamespaceTerminating"."""

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
    """metav1.Status, as far as it explains an error."""

    message: str
    details: _Details | None = None


async def answer_error(response: aiohttp.ClientResponse) -> AnswerError:
    """The error that an answer stands for. Reads the beginning of its body; raises what reading raises."""
    body = await response.content.read(4096)
    try:
        status = msgspec.json.decode(body, type=_Status)
    except ValueError:  # from a proxy, or longer than what was read
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
    except (library.ConfigException, yaml.YAMLError, OSError, ValueError, *_NO_WORDS) as error:
        # The loader trips over malformed files with whatever comes first, and ssl over their certificates.
        place = f"kubeconfig {kubeconfig}" if kubeconfig else "pod's service account (kubernetes.kubeconfig is not set)"
        raise SettingsError(f"the {place} can't be used: {_said(error, kubeconfig)}; {remedy}") from error
    client.user_agent = "gpumgr"
    return client


def _check(kubeconfig: Path) -> None:
    """What the library does not say: it takes a file that is missing for an empty one, and warns of that in the log.

    Raises OSError, ValueError or YAMLError.
    """
    if ":" in str(kubeconfig):
        raise ValueError("the library takes a path with a colon for several paths")
    if not stat.S_ISREG(os.stat(kubeconfig).st_mode):
        raise ValueError("it is no plain file")
    with kubeconfig.open("rb") as file:  # of a text, PyYAML's errors would quote lines, and secrets with them
        content = yaml.safe_load(file)
    if not isinstance(content, dict):
        raise ValueError("it holds no kubeconfig (kind: Config, with clusters, users, contexts and current-context)")


def _said(error: Exception, kubeconfig: Path | None) -> str:
    """In one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename in (None, str(kubeconfig)) else f"{error.filename}: {error.strerror}"
    if isinstance(error, yaml.YAMLError):
        return f"it is no YAML ({' '.join(str(error).split())})"
    if isinstance(error, _NO_WORDS):
        return "it is not laid out as a kubeconfig"
    return " ".join(str(error).split()).rstrip(".")


def _notice_dead_peer(response: aiohttp.ClientResponse) -> None:
    """Needs the connection, which is gone already when the whole answer came in one piece."""
    transport = response.connection.transport if response.connection else None
    sock = transport.get_extra_info("socket") if transport else None
    if sock is None:
        return
    with contextlib.suppress(OSError):
        for level, option, value in _TCP_OPTIONS:
            sock.setsockopt(level, option, value)
