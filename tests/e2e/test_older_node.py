"""The oldest pair that is run for real: kubelet 1.35 with Debian's containerd 1.6, at the API server that all tests have."""

from .manifests import SHOW, gpu_pod
from .node import Node


def test_pods_get_gpus_from_an_older_kubelet_and_container_runtime(node: Node) -> None:
    """The agent that served the newer kubelet registers with the older one, and with the newer one again."""
    with node.cluster.older_node():
        info = node.cluster.node()["status"]["nodeInfo"]
        assert info["kubeletVersion"].startswith("v1.35.")
        assert info["containerRuntimeVersion"].startswith("containerd://1.6.")
        node.wait_offered(node.agent.offer)
        node.offer_all()
        node.run([gpu_pod("share", 30, 16, bound=False, command=SHOW), gpu_pod("pair", 200, bound=False)])
        node.check()
        node.wait_log("share", "shown")
        assert "NVIDIA_VISIBLE_DEVICES=GPU-" in node.cluster.log_of("share")
        node.delete(["share", "pair"])
        node.agent.wait_empty()
    node.wait_offered(node.agent.offer)
    node.run([gpu_pod("later", 30, 16)])
    node.check()
