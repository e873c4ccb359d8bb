"""The credentials for the API server: a kubeconfig file, or the service account of the pod.

A separate thread reads the files, because a file system that hangs must not stop the event loop.
"""

import asyncio
import os
import ssl
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import structlog
import yaml

from gpumgr.common.aio import DaemonCalls
from gpumgr.common.errors import SettingsError
from gpumgr.kube.library import kubeconfig_loader

_log = structlog.get_logger(__name__)

#: Source: Kubernetes' documentation, "Accessing the API from within a Pod".
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: How long a token is used before it is read again (as in client-go). The kubelet replaces the token long before it expires.
_TOKEN_SECONDS: Final = 60.0
_FILES_SECONDS: Final = 10.0
#: A kubeconfig may run a program that asks a cloud for a token.
_KUBECONFIG_SECONDS: Final = 60.0
#: What kubernetes_asyncio raises for a malformed kubeconfig. The texts of these errors explain nothing.
_MALFORMED: Final = (TypeError, KeyError, AttributeError, AssertionError, RecursionError)


@dataclass(kw_only=True)
class Credentials:
    """How to connect to the API server. kubernetes_asyncio's kubeconfig loader sets attributes with these names.

    `ssl_ca_cert`, `cert_file` and `key_file` are paths. `context` is None for a server without TLS.
    """

    host: str = ""
    ssl_ca_cert: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify_ssl: bool = True
    tls_server_name: str | None = None
    proxy: str | None = None
    #: "BearerToken" -> the header Authorization.
    api_key: dict[str, str] = field(default_factory=dict)
    context: ssl.SSLContext | None = None

    def headers(self) -> dict[str, str]:
        return {"Authorization": token} if (token := self.api_key.get("BearerToken")) else {}


class CredentialFiles:
    """Reads the credentials. `kubeconfig`: None for the service account of the pod. Each error ends with `remedy`."""

    def __init__(self, kubeconfig: Path | None, remedy: str, *, service_account: Path = _SERVICE_ACCOUNT) -> None:
        self._kubeconfig, self._remedy, self._account = kubeconfig, remedy, service_account
        self._calls = DaemonCalls("api-credentials")
        self._token_read = asyncio.Lock()
        self._token_due = 0.0

    async def read(self) -> Credentials:
        """Raises SettingsError if the files are missing or can't be used."""
        seconds = _FILES_SECONDS if self._kubeconfig is None else _KUBECONFIG_SECONDS
        try:
            found = await self._calls.call(self._read, timeout_seconds=seconds)
        except Exception as error:  # the library raises anything for a malformed file, and ssl for its certificates
            raise SettingsError(
                f"the {self._place} can't be used: {_message(error, self._kubeconfig)}; {self._remedy}"
            ) from error
        self._token_due = time.monotonic() + _TOKEN_SECONDS
        return found

    async def refresh(self, credentials: Credentials) -> None:
        """Reads the token of the service account again if due. If that fails, the earlier token stays in use."""
        if self._kubeconfig is not None or time.monotonic() < self._token_due:
            return
        async with self._token_read:
            if time.monotonic() < self._token_due:
                return
            self._token_due = time.monotonic() + _TOKEN_SECONDS
            try:
                credentials.api_key = await self._calls.call(self._token, timeout_seconds=_FILES_SECONDS)
            except (OSError, ValueError) as error:
                _log.warning("credentials_not_renewed", error=f"the {self._place} can't be used: {_message(error, None)}")

    @property
    def _place(self) -> str:
        if self._kubeconfig is not None:
            return f"kubeconfig {self._kubeconfig}"
        return "pod's service account (kubernetes.kubeconfig is not set)"

    def _read(self) -> Credentials:
        if self._kubeconfig is None:
            found = self._of_pod(os.environ)
        else:
            _check(self._kubeconfig)
            found = Credentials()
            asyncio.run(kubeconfig_loader()(config_file=str(self._kubeconfig), client_configuration=found, persist_config=False))
            if not found.host:
                raise ValueError("its cluster has no server")
        if found.host.startswith("https"):
            found.context = _tls(found)
        found.proxy = found.proxy or _environment_proxy(found.host)
        return found

    def _of_pod(self, environment: Mapping[str, str]) -> Credentials:
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ValueError(
                "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, so this process does not run in a pod"
            )
        address = f"[{host}]" if ":" in host else host
        return Credentials(host=f"https://{address}:{port}", ssl_ca_cert=str(self._account / "ca.crt"), api_key=self._token())

    def _token(self) -> dict[str, str]:
        token = (self._account / "token").read_text().strip()
        if not token:
            raise ValueError(f"{self._account / 'token'} is empty")
        return {"BearerToken": f"Bearer {token}"}


def _environment_proxy(server: str) -> str | None:
    """The proxy for this URL from HTTPS_PROXY, HTTP_PROXY and NO_PROXY. aiohttp's `trust_env` would also read ~/.netrc, on two threads for
    each request."""
    url = urlsplit(server)
    return None if proxy_bypass(url.netloc) else getproxies().get(url.scheme)


def _tls(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=credentials.ssl_ca_cert)
    if credentials.cert_file:
        context.load_cert_chain(credentials.cert_file, keyfile=credentials.key_file)
    if not credentials.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _check(kubeconfig: Path) -> None:
    """Raises OSError, ValueError or YAMLError. The library would treat a missing file as an empty one."""
    if ":" in str(kubeconfig):
        raise ValueError("a path with a colon means several paths")
    if not stat.S_ISREG(os.stat(kubeconfig).st_mode):
        raise ValueError("it is not a regular file")
    # PyYAML gets bytes, because its errors would quote lines of a text, which can contain secrets.
    with kubeconfig.open("rb") as file:
        content = yaml.safe_load(file)
    if not isinstance(content, dict):
        raise ValueError("it is not a kubeconfig (kind: Config, with clusters, users, contexts and current-context)")


def _message(error: Exception, kubeconfig: Path | None) -> str:
    if isinstance(error, TimeoutError):
        return f"its files could not be read in time{f' ({error})' if str(error) else ''}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename in (None, str(kubeconfig)) else f"{error.filename}: {error.strerror}"
    if isinstance(error, yaml.YAMLError):
        return f"it is not YAML ({' '.join(str(error).split())})"
    if isinstance(error, _MALFORMED):
        return "it does not have the structure of a kubeconfig"
    return " ".join(str(error).split()).rstrip(".")
