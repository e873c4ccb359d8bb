"""What the API server would let us do: SelfSubjectAccessReview, which every account may ask."""

from dataclasses import dataclass
from typing import Final

import msgspec

from gpumgr.errors import GpumgrError
from gpumgr.kubeapi.client import ApiServer, answer_error

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
    """Whether we have the right. Raises GpumgrError for another answer, and what `ApiServer.request` raises when there is none."""
    attributes = {"verb": right.verb, "group": "", "resource": right.resource, "subresource": right.subresource}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value is not None}},
    }
    async with server.request("POST", _PATH, {}, body=body) as response:
        if response.status >= 300:
            raise await answer_error(response)
        answer = await response.read()
    try:
        return msgspec.json.decode(answer, type=_Review).status.allowed
    except ValueError as error:  # msgspec's own errors, and that of bytes which are no text
        raise GpumgrError(f"the API server's answer is no SelfSubjectAccessReview: {error}") from error
