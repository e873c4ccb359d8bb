"""Which labels of the node to write, given what stands there. Pure.

Law 1. Where NVIDIA's gpu-feature-discovery labels the node, `nvidia.com/` is its own; so is a label there that we did not write.
Law 2. Which labels are ours stands in an annotation, so that those that no longer hold are taken away, after a restart too.
"""

from collections.abc import Mapping
from typing import Any, Final

from gpumgr.kubeapi.writer.notices import Body

#: The keys of our labels, joined by ",".
LABELS_ANNOTATION: Final = "gpumgr.io/labels"
NVIDIA: Final = "nvidia.com/"
_DISCOVERY_LABEL: Final = "nvidia.com/gfd.timestamp"
_DISCOVERY_MANAGER: Final = "gpu-feature-discovery"


def labels_patch(node: Mapping[str, Any], wanted: Mapping[str, str]) -> Body | None:
    """A merge patch of the Node's labels and of the annotation that remembers them; None if all stands there already."""
    metadata = node.get("metadata") or {}
    there: Mapping[str, str] = metadata.get("labels") or {}
    remembered: str = (metadata.get("annotations") or {}).get(LABELS_ANNOTATION) or ""
    before = set(filter(None, remembered.split(",")))
    discovered = _is_discovered(metadata, there)

    def theirs(key: str) -> bool:
        return key.startswith(NVIDIA) and (discovered or (key in there and key not in before))

    ours = {key: value for key, value in wanted.items() if not theirs(key)}
    changes: dict[str, str | None] = {key: value for key, value in ours.items() if there.get(key) != value}
    changes |= {key: None for key in sorted(before - ours.keys()) if key in there and not theirs(key)}
    remember = ",".join(sorted(ours))
    patch: Body = {"labels": changes} if changes else {}
    if remember != remembered:
        patch["annotations"] = {LABELS_ANNOTATION: remember or None}
    return {"metadata": patch} if patch else None


def _is_discovered(metadata: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    managers = (each.get("manager") or "" for each in metadata.get("managedFields") or ())
    return _DISCOVERY_LABEL in labels or any(manager.startswith(_DISCOVERY_MANAGER) for manager in managers)
