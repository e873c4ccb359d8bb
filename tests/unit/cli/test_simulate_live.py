"""What a snapshot keeps of a pod."""

from typing import Any

from gpumgr.cli.simulate_live import _is_kept
from gpumgr.cluster.scheduler.objects import parse_watched_pod
from gpumgr.common.units import (
    CORE_LIMIT_ANNOTATION,
    MEMORY_LIMIT_ANNOTATION,
    RESIZE_ANNOTATION,
    SUSPEND_ANNOTATION,
    SUSPEND_WHEN_IDLE_ANNOTATION,
)
from gpumgr.kube.pods import CLUSTER_ANNOTATION

#: Only the node's agent uses these, or they are HAMi's records of pods with HAMi's resources, which the simulation does not read.
OTHERS = {
    CORE_LIMIT_ANNOTATION,
    MEMORY_LIMIT_ANNOTATION,
    RESIZE_ANNOTATION,
    SUSPEND_ANNOTATION,
    SUSPEND_WHEN_IDLE_ANNOTATION,
    CLUSTER_ANNOTATION,
    "hami.io/vgpu-node",
}


class Recorder(dict[str, Any]):
    """Annotations that note which of them are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, *default: Any) -> Any:
        self.read.add(key)
        return super().get(key, *default)

    def __bool__(self) -> bool:
        return True


def test_a_snapshot_has_all_annotations_that_decide_where_a_pod_goes() -> None:
    annotations = Recorder()
    container = {"name": "main", "resources": {"limits": {"tencent.com/vcuda-core": "10", "tencent.com/vcuda-memory": "4"}}}
    parse_watched_pod(
        {
            "metadata": {"namespace": "team", "name": "web", "uid": "u", "annotations": annotations},
            "spec": {"nodeName": "a", "containers": [container]},
        }
    )
    assert "nvidia.com/vgpu-mode" in annotations.read
    left_out = {key for key in annotations.read if not _is_kept(f"pods/metadata/annotations/{key}")}
    assert left_out <= OTHERS
