"""Checks rights at the API server: one's own with SelfSubjectAccessReview, which every account may create, and those of other users with
SubjectAccessReview."""

from dataclasses import asdict, dataclass
from typing import Final

import msgspec

from gpumgr.common.errors import GpumgrError
from gpumgr.common.foreign_text import UnreadableText, convert
from gpumgr.kube.client import ApiServer

_GROUP: Final = "authorization.k8s.io/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One verb on one resource; of the core API group, in all namespaces, unless `group` and `namespace` say otherwise."""

    verb: str
    resource: str
    subresource: str | None = None
    group: str = ""
    namespace: str | None = None
    name: str | None = None

    def __str__(self) -> str:
        return f"{self.verb} {'/'.join(filter(None, (self.resource, self.subresource)))}"


class _Status(msgspec.Struct):
    allowed: bool = False


class _Review(msgspec.Struct):
    status: _Status


async def allowed(server: ApiServer, right: Right, *, user: str | None = None) -> bool:
    """Whether this account, or `user`, has the right. Raises GpumgrError for an invalid answer, and what `ApiServer.request` raises."""
    kind = "SelfSubjectAccessReview" if user is None else "SubjectAccessReview"
    attributes = {key: value for key, value in asdict(right).items() if value is not None}
    spec = {"resourceAttributes": attributes} | ({} if user is None else {"user": user})
    body = {"apiVersion": _GROUP, "kind": kind, "spec": spec}
    answer = await server.read("POST", f"/apis/{_GROUP}/{kind.lower()}s", body)
    try:
        return convert(answer, _Review).status.allowed
    except UnreadableText as error:
        raise GpumgrError(f"the API server's answer is no {kind}: {error}") from error
