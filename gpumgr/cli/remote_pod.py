"""One pod at the API server, for commands that set its annotations and wait for the answer of its node's agent."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import click

from gpumgr.cli.options import needed_kubeconfig
from gpumgr.common.errors import GpumgrError
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.kube.client import AnswerError, ApiServer
from gpumgr.placement.pods import PodKey

T = TypeVar("T")

_POLL_SECONDS: Final = 0.3
#: Attempts to write an annotation while other writers change the pod.
_TRIES: Final = 5
_CONFLICT: Final = 409

pod_kubeconfig_option = click.option(
    "--kubeconfig", type=click.Path(path_type=Path), help="The cluster's API server.  [default: $KUBECONFIG, ~/.kube/config]"
)


class RemotePod:
    def __init__(self, server: ApiServer, pod: PodKey) -> None:
        self._server, self._name = server, "/".join(pod)
        namespace, name = (quote(part, safe="") for part in pod)
        self._path = f"/api/v1/namespaces/{namespace}/pods/{name}"

    async def read(self) -> dict[str, Any]:
        """Raises GpumgrError if the pod does not exist or can't be read."""
        try:
            if (found := await self._server.find(self._path)) is not None:
                return found
        except AnswerError as error:
            raise GpumgrError(f"pod {self._name} can't be read: {error}") from error
        raise GpumgrError(f"there is no pod {self._name}; for another namespace give NAMESPACE/POD")

    async def read_for(self, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Yields the pod at least once. Raises the errors of `read`."""
        last = time.monotonic() + seconds
        yield await self.read()
        while time.monotonic() < last:
            await asyncio.sleep(_POLL_SECONDS)
            yield await self.read()

    async def annotate(self, key: str, text_of: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
        """Sets the annotation to `text_of(pod)`. If another writer changes the pod in between, reads the pod and tries again. Returns the
        pod as it was before. Raises GpumgrError, and the errors of `text_of`."""
        for _ in range(_TRIES):
            pod = await self.read()
            same = {name: pod["metadata"][name] for name in ("uid", "resourceVersion") if name in pod["metadata"]}
            try:
                body = {"metadata": {**same, "annotations": {key: text_of(pod)}}}
                if await self._server.send("PATCH", self._path, body, but=(_CONFLICT,)):
                    return pod
            except AnswerError as error:
                raise GpumgrError(f"the annotation {key} can't be written: {error}") from error
        raise GpumgrError(f"the annotation {key} can't be written: other programs keep changing the pod; try again")


@asynccontextmanager
async def remote_pod(pod: PodKey, kubeconfig: Path | None) -> AsyncIterator[RemotePod]:
    """Raises InputError without a kubeconfig, and GpumgrError if the API server does not answer."""
    async with ApiServer.session(needed_kubeconfig(kubeconfig), remedy="give another --kubeconfig") as server:
        yield RemotePod(server, pod)


def annotation(pod: Mapping[str, Any], key: str, kind: type[T], default: str) -> T:
    """`default` is the text if the pod lacks the annotation. Raises GpumgrError for unreadable text."""
    try:
        return decode_json((pod["metadata"].get("annotations") or {}).get(key, default), kind)
    except UnreadableText as error:
        raise GpumgrError(f"the pod's annotation {key} can't be read: {error}") from error
