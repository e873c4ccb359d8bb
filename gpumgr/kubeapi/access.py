"""Checks the agent's rights at the API server with SelfSubjectAccessReview, which every account may create."""

from dataclasses import dataclass
from typing import Final

import msgspec

from gpumgr.errors import GpumgrError
from gpumgr.kubeapi.client import ApiServer

_PATH: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One verb on one resource of the core API group, in all namespaces."""

    verb: str
    resource: str
    subresource: str | None = None

    def __str__(self) -> str:
        return f"{self.verb} {'/'.join(filter(None, (self.resource, self.subresource)))}"


class _Status(msgspec.Struct):
    allowed: bool = False


class _Review(msgspec.Struct):
    status: _Status


async def allowed(server: ApiServer, right: Right) -> bool:
    """Whether the agent has the right. Raises GpumgrError for an invalid answer, and what `ApiServer.request` raises."""
    attributes = {"verb": right.verb, "group": "", "resource": right.resource, "subresource": right.subresource}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value is not None}},
    }
    answer = await server.read("POST", _PATH, body)
    try:
        return msgspec.convert(answer, type=_Review).status.allowed
    except msgspec.ValidationError as error:
        raise GpumgrError(f"the API server's answer is no SelfSubjectAccessReview: {error}") from error
