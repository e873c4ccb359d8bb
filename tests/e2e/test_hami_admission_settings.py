"""HAMi's settings gpuCorePolicy, overwriteEnv and defaultGPUNum on the real API server. A module of its own: the policies have one name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Cluster
from .manifests import container
from .test_hami_admission import made, policies, variables, webhook


@pytest.fixture(params=["policy", "webhook"])
def configured(cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    if request.param == "policy":
        with policies(cluster, values={"corePolicy": '"force"', "hideGpus": "true", "defaultGpus": '"2"'}):
            yield cluster
        return
    with (
        webhook(cluster, tmp_path, "webhook.core_policy=force", "webhook.hide_gpus=true", "webhook.default_gpus=2") as made,
        policies(cluster, ["Validating"], [made]),
    ):
        yield cluster


def test_variables_of_containers_as_from_hamis_webhook(configured: Cluster) -> None:
    first = {**container("first", 0, 0), "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
    found = made(configured, [{"gpumem": 500, "priority": 0}, {}], initContainers=[first])["spec"]
    asking, other = found["containers"]
    assert asking["resources"]["limits"]["nvidia.com/gpu"] == "2"
    policy = {"GPU_CORE_UTILIZATION_POLICY": "force"}
    assert variables(asking).items() >= {**policy, "CUDA_TASK_PRIORITY": "0"}.items()
    assert variables(other).items() >= {**policy, "NVIDIA_VISIBLE_DEVICES": "none"}.items()
    assert variables(found["initContainers"][0]) == {**policy, "NVIDIA_VISIBLE_DEVICES": "all"}
