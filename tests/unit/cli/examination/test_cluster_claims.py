"""The policies of several releases in one cluster."""

from typing import Any, cast

from gpumgr.cli.examination.cluster_config import _POLICIES, POLICIES_ANNOTATION, POLICIES_VERSION, look_at_policies


class Server:
    def __init__(self, **versions: str) -> None:
        """Release -> the version of its policies."""
        self._items = {
            f"{kind}admissionpolicies": [
                {"metadata": {"name": f"{release}-claims-{end}", "annotations": {POLICIES_ANNOTATION: version}}}
                for release, version in versions.items()
                for end in ends
            ]
            for kind, ends in _POLICIES.items()
        }

    async def find(self, path: str) -> dict[str, Any]:
        resource = path.rpartition("/")[2]
        if policies := self._items.get(resource):
            return {"items": policies}
        names = [each["metadata"]["name"] for each in self._items[resource.replace("policybindings", "policies")]]
        return {"items": [{"spec": {"policyName": name}} for name in names]}


async def test_the_versions_of_all_releases_are_examined() -> None:
    found = await look_at_policies(cast("Any", Server(a=POLICIES_VERSION, b="1", c="0")), installed=True)
    assert found.state == "warning"
    for version in ("0", "1"):
        assert f"the validating policy *-claims-classes has version {version} in place of" in found.message
    found = await look_at_policies(cast("Any", Server(a=POLICIES_VERSION, b=POLICIES_VERSION)), installed=True)
    assert found.state == "ok"
