"""A small client of the API server: requests over one kept connection, and a watch that keeps all pods at hand."""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from .manifests import Json

NAMESPACE = "default"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_KEPT_SECONDS = 45.0


class ApiError(Exception):
    """The API server said no."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def refusal(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Status and reason with which the API server refuses a call; "" if it does not."""
    try:
        call(*arguments, **named)
    except ApiError as error:
        return str(error)
    return ""


class Api:
    """One bearer's access to the API server. Not for several threads at once."""

    def __init__(self, port: int, authority: Path, token: str) -> None:
        self._port = port
        self._context = ssl.create_default_context(cafile=str(authority))
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._connection: http.client.HTTPSConnection | None = None
        self._used_at = 0.0

    def connect(self, timeout: float | None = 60) -> http.client.HTTPSConnection:
        """A new connection."""
        return http.client.HTTPSConnection("127.0.0.1", self._port, timeout=timeout, context=self._context)

    def close(self) -> None:
        """Closes the kept connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def send(
        self, connection: http.client.HTTPSConnection, method: str, path: str, body: Json | None = None
    ) -> http.client.HTTPResponse:
        """Sends one request and answers the response's head; ApiError where it is not a success. A PATCH is a merge patch."""
        kind = {"Content-Type": "application/merge-patch+json"} if method == "PATCH" else {}
        connection.request(method, path, None if body is None else json.dumps(body).encode(), {**self._headers, **kind})
        response = connection.getresponse()
        if response.status >= 300:
            raise ApiError(response.status, response.read().decode(errors="replace"))
        return response

    def request(self, method: str, path: str, body: Json | None = None) -> Json:
        """One request over the kept connection. The API server closes one that was idle for 90 s, so such a one is not used either;
        one that turns out to be closed all the same is replaced."""
        if time.monotonic() - self._used_at > _KEPT_SECONDS:
            self.close()
        kept = self._connection is not None
        try:
            data = self._over_kept(method, path, body)
        except (ConnectionError, ssl.SSLError):
            if not kept:
                raise
            data = self._over_kept(method, path, body)
        self._used_at = time.monotonic()
        answer: Json = json.loads(data) if data.startswith(b"{") else {"text": data.decode()}
        return answer

    def _over_kept(self, method: str, path: str, body: Json | None) -> bytes:
        if self._connection is None:
            self._connection = self.connect()
        try:
            return self.send(self._connection, method, path, body).read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def annotate(self, path: str, annotations: Mapping[str, str | None]) -> Json:
        """Merges annotations into those of an object; None removes one."""
        return self.request("PATCH", path, {"metadata": {"annotations": annotations}})

    def may(self, verb: str, resource: str, *, group: str = "", namespace: str = NAMESPACE) -> bool:
        """Whether this bearer has the right now. A new role has effect a moment after its binding was created."""
        resource, _, subresource = resource.partition("/")
        wanted = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "namespace": namespace}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        }
        found = self.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        return bool(found["status"]["allowed"])

    def events(self, pod: str, uid: str) -> list[Json]:
        """The events about one life of a pod: pods of before that had its name have left theirs behind."""
        query = urlencode({"fieldSelector": f"involvedObject.name={pod},involvedObject.uid={uid},involvedObject.kind=Pod"})
        items: list[Json] = self.request("GET", f"/api/v1/namespaces/{NAMESPACE}/events?{query}")["items"]
        return items


class Pods:
    """All pods of the namespace, kept current by a watch in a thread.

    `since[name]` is the time (monotonic clock) at which each phase of a pod was first seen.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._news = threading.Condition()
        self._pods: dict[str, Json] = {}
        self.since: dict[str, dict[str, float]] = {}
        self._stopping = False
        self._connection: http.client.HTTPSConnection | None = None
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch."""
        self._stopping = True
        if self._connection is not None and self._connection.sock is not None:
            self._connection.sock.close()
        self._thread.join(2)

    def all(self) -> dict[str, Json]:
        """The pods by name, as last seen."""
        with self._news:
            return dict(self._pods)

    def wait(self, what: str, condition: Callable[[Mapping[str, Json]], bool], timeout: float) -> dict[str, Json]:
        """Waits until `condition(pods)`; TimeoutError with the pods' states otherwise."""
        with self._news:
            if not self._news.wait_for(lambda: condition(self._pods), timeout):
                states = "".join(f"\n  {name}: {state(pod)}" for name, pod in self._pods.items())
                raise TimeoutError(f"{what}: not within {timeout:g} s; pods:{states}")
            return dict(self._pods)

    def _run(self) -> None:
        while not self._stopping:
            try:
                with self._opened() as connection:
                    self._follow(connection)
            except (OSError, ValueError, ApiError, http.client.HTTPException, AttributeError):
                if not self._stopping:
                    time.sleep(0.1)

    @contextmanager
    def _opened(self) -> Iterator[http.client.HTTPSConnection]:
        self._connection = connection = self._api.connect(timeout=None)
        try:
            yield connection
        finally:
            connection.close()

    def _follow(self, connection: http.client.HTTPSConnection) -> None:
        listed = json.loads(self._api.send(connection, "GET", PODS).read())
        with self._news:
            self._pods = {}
            for item in listed["items"]:
                self._keep(item)
            self._news.notify_all()
        query = urlencode({"watch": 1, "resourceVersion": listed["metadata"]["resourceVersion"]})
        for line in self._api.send(connection, "GET", f"{PODS}?{query}"):
            event: dict[str, Any] = json.loads(line)
            if event["type"] == "ERROR":
                return
            with self._news:
                if event["type"] == "DELETED":
                    self._pods.pop(event["object"]["metadata"]["name"], None)
                else:
                    self._keep(event["object"])
                self._news.notify_all()

    def _keep(self, item: Json) -> None:
        name = item["metadata"]["name"]
        self._pods[name] = item
        self.since.setdefault(name, {}).setdefault(phase(item), time.monotonic())


def state(pod: Json) -> str:
    """A pod's phase, and of one that does not run its node and what scheduler, kubelet and containers report."""
    if phase(pod) == "Running":
        return "Running"
    conditions = [each["message"] for each in pod["status"].get("conditions", []) if each.get("message")]
    waiting = [each["state"].get("waiting") for each in pod["status"].get("containerStatuses", [])]
    return f"{phase(pod)} on node {pod['spec'].get('nodeName')}; conditions {conditions}; containers wait for {waiting}"


def phase(pod: Json) -> str:
    """A pod's phase; `Deleting` once it has been asked to go."""
    if pod["metadata"].get("deletionTimestamp"):
        return "Deleting"
    return str(pod["status"].get("phase", "Pending"))
