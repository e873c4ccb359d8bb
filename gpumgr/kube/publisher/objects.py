"""The desired states other than events. For a pod: annotations, eviction and deletion. For the node: annotations, labels and condition."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec
import structlog

from gpumgr.agent.ports import Eviction
from gpumgr.kube.client import AnswerError, ApiServer
from gpumgr.kube.publisher.desired import RESYNC_SECONDS, Desired
from gpumgr.kube.publisher.events import Body, timestamp
from gpumgr.placement.labels import NVIDIA
from gpumgr.placement.pods import PodKey, PodView

_log = structlog.get_logger(__name__)

#: The kubelet's reason for a pod that a device plugin refused.
REFUSED: Final = "UnexpectedAdmissionError"
CONDITION_TYPE: Final = "GpuTrouble"
#: Annotation of the node: the keys of the agent's labels, joined by ",". After a restart it shows which labels the agent wrote.
LABELS_ANNOTATION: Final = "gpumgr.io/labels"
_DISCOVERY_LABEL: Final = "nvidia.com/gfd.timestamp"
_DISCOVERY_MANAGER: Final = "gpu-feature-discovery"
#: The kubelet's interval for a condition with an unchanged status (nodeStatusUpdateFrequency).
_CONDITION_SECONDS: Final = 10.0
_BY_HAND: Final = (
    "if an earlier agent wrote labels, annotations or a condition to this node, remove them by hand; the commands are in "
    'docs/operations.md, section "Remove"'
)


_Value = TypeVar("_Value")


@dataclass(eq=False, slots=True)
class _PodWrite(Desired):
    """A write to the pod with this UID. The API server answers 404 if the pod is gone, and 409 if another pod has the name."""

    pod: PodKey
    uid: str

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.pod[0]}/pods/{self.pod[1]}"


@dataclass(eq=False, slots=True)
class PodAnnotations(_PodWrite):
    """Annotations of the pod; None removes one."""

    what = "pod"
    rights = "patch on pods"
    values: Mapping[str, str | None] = field(default_factory=dict)

    async def write(self, server: ApiServer, node: str) -> None:  # noqa: ARG002
        patch = {"metadata": {"uid": self.uid, "annotations": self.values}}
        await server.send("PATCH", self.path, patch, but=(404,))


@dataclass(eq=False, slots=True)
class PodDeletion(_PodWrite):
    """The deletion of the pod. It is retried after a refusal, because the right may be granted later."""

    what = "pod"
    rights = "delete on pods"
    insists = True

    async def write(self, server: ApiServer, node: str) -> None:  # noqa: ARG002
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": self.uid}}
        if await server.send("DELETE", self.path, body, but=(404, 409)):
            _log.info("failed_pod_deleted", pod="/".join(self.pod), pod_uid=self.uid)


def waits_for_deletion(view: PodView | None) -> bool:
    """Whether a device plugin refused this pod of a controller, and the pod is not being deleted yet. After the deletion the controller
    creates another pod at once, without a back-off."""
    return view is not None and view.reason == REFUSED and view.wants_gpu and view.controlled and not view.deleted


@dataclass(eq=False, slots=True)
class PodEviction(_PodWrite):
    """The eviction of the pod. `reasons`: requester (a drain, or the memory limit) -> its reason. `wanted_at` is infinity
    once the pod is gone."""

    what = "eviction"
    rights = "create on pods/eviction"
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def eviction(self) -> Eviction:
        return Eviction(uid=self.uid, pod=self.pod, reason="; ".join(self.reasons.values()))

    async def write(self, server: ApiServer, node: str) -> None:  # noqa: ARG002
        """The body has no version, so the API server takes its own (policy/v1; before 1.22 policy/v1beta1)."""
        (namespace, name), reason = self.pod, self.eviction.reason
        body = {"metadata": {"namespace": namespace, "name": name}, "deleteOptions": {"preconditions": {"uid": self.uid}}}
        if await server.send("POST", f"{self.path}/eviction", body, but=(404, 409)):
            _log.info("pod_evicted", pod=f"{namespace}/{name}", pod_uid=self.uid, reason=reason)


@dataclass(eq=False, slots=True)
class NodePart(Desired, Generic[_Value]):
    """A part of the Node. Callers repeat the same state. A value is written on change and every RESYNC_SECONDS, a removal once."""

    value: _Value | None = None

    def set(self, value: _Value | None, now: float) -> bool:
        """Returns whether a write is due."""
        changed, self.value = value != self.value, value
        due = changed or now - self.wanted_at >= (RESYNC_SECONDS if value else math.inf)
        self.wanted_at = now if due else self.wanted_at
        return due

    @abstractmethod
    async def apply(self, server: ApiServer, path: str) -> bool:
        """Writes to the Node at `path`. Returns whether labels or a condition changed. Raises what `ApiServer.send` raises."""

    async def write(self, server: ApiServer, node: str) -> None:
        """Ignores a 403 for a removal. Usually there is nothing to remove, so the agent need not have the right."""
        try:
            if await self.apply(server, f"/api/v1/nodes/{node}") and not self.value:
                _log.info("node_description_removed", what=self.what)
        except AnswerError as error:
            if error.status != 403 or self.value:
                raise
            _log.info("node_description_left", what=self.what, error=str(error), remedy=_BY_HAND)


@dataclass(eq=False, slots=True)
class NodeAnnotations(NodePart[Mapping[str, str]]):
    """`removed`: the keys that the next write removes."""

    what = "annotations"
    rights = "patch on nodes"
    removed: set[str] = field(default_factory=set)

    async def apply(self, server: ApiServer, path: str) -> bool:
        taken, self.removed = self.removed, set()
        try:
            await server.send("PATCH", path, {"metadata": {"annotations": {**dict.fromkeys(taken), **(self.value or {})}}})
        except BaseException:
            self.removed |= taken
            raise
        return False


@dataclass(eq=False, slots=True)
class NodeLabels(NodePart[Mapping[str, str]]):
    """All labels of the agent. A write also removes labels that the agent wrote earlier and that are not in `value`."""

    what = "labels"
    rights = "get and patch on nodes"

    async def apply(self, server: ApiServer, path: str) -> bool:
        patch = labels_patch(await server.read("GET", path), self.value or {})
        return patch is not None and await server.send("PATCH", path, patch)


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """`reason` is one CamelCase word."""

    trouble: bool
    reason: str
    message: str


@dataclass(eq=False, slots=True)
class NodeCondition(NodePart[Condition]):
    """The condition GpuTrouble, if any."""

    what = "condition"
    rights = "get on nodes and patch on nodes/status"
    wall: Callable[[], float] = time.time

    def set(self, value: Condition | None, now: float) -> bool:
        """If the status is the same, a new text is ignored for _CONDITION_SECONDS. It is not lost, because callers repeat the condition."""
        same = value is not None and self.value is not None and value.trouble == self.value.trouble
        return not (same and now - self.wanted_at < _CONDITION_SECONDS) and NodePart.set(self, value, now)

    async def apply(self, server: ApiServer, path: str) -> bool:
        """Reads the Node first: an earlier process may have written the same status. Only a new status changes `lastTransitionTime`."""
        found, now = _find_condition(await server.read("GET", path)), timestamp(self.wall())
        if self.value is not None:
            status = "True" if self.value.trouble else "False"
            fields = {"status": status, "reason": self.value.reason, "message": self.value.message, "lastHeartbeatTime": now}
            if found is None or found.get("status") != status:
                fields["lastTransitionTime"] = now
        elif found is not None:
            fields = {"$patch": "delete"}
        else:
            return False
        # A strategic merge patch merges conditions by type, and `$patch: delete` removes one (source: Kubernetes' "Update API Objects in
        # Place Using kubectl patch").
        conditions = {"conditions": [{"type": CONDITION_TYPE, **fields}]}
        return await server.send("PATCH", f"{path}/status", {"status": conditions}, patch="strategic")


def _find_condition(node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Iterator[Mapping[str, Any]] = iter((node.get("status") or {}).get("conditions") or ())
    return next((each for each in found if each.get("type") == CONDITION_TYPE), None)


def labels_patch(node: Mapping[str, Any], wanted: Mapping[str, str]) -> Body | None:
    """A merge patch of the Node's labels and LABELS_ANNOTATION; None without changes. Labels below `nvidia.com/` stay if the agent did not
    write them, or if NVIDIA's gpu-feature-discovery runs on the node."""
    metadata = node.get("metadata") or {}
    present: Mapping[str, str] = metadata.get("labels") or {}
    listed: str = (metadata.get("annotations") or {}).get(LABELS_ANNOTATION) or ""
    before = set(filter(None, listed.split(",")))
    managers = (each.get("manager") or "" for each in metadata.get("managedFields") or ())
    discovered = _DISCOVERY_LABEL in present or any(manager.startswith(_DISCOVERY_MANAGER) for manager in managers)

    def foreign(key: str) -> bool:
        return key.startswith(NVIDIA) and (discovered or (key in present and key not in before))

    ours = {key: value for key, value in wanted.items() if not foreign(key)}
    changes: dict[str, str | None] = {key: value for key, value in ours.items() if present.get(key) != value}
    changes |= {key: None for key in sorted(before - ours.keys()) if key in present and not foreign(key)}
    patch: Body = {"labels": changes} if changes else {}
    if (keys := ",".join(sorted(ours))) != listed:
        patch["annotations"] = {LABELS_ANNOTATION: keys or None}
    return {"metadata": patch} if patch else None
