"""On a node of MPS, a pod that the operator excepts from limits."""

from .agent import Agent
from .cluster import Cluster
from .manifests import SLEEP
from .tenants import Changes, gpu_index, limited, lines, tenant, wait_line
from .test_mps import PROGRAM, end_daemons, exclusive


def test_who_is_excepted_goes_through_the_daemon_without_limits(cluster: Cluster, running_agent: Agent) -> None:
    changes: Changes = {
        "enforcement": {"backend": "mps", "orphan_grace_seconds": 1, "overrides": ["default/default=none"]},
        "mps": {"control_program": str(PROGRAM), "protocol": "2", "idle_seconds": 1},
    }
    with limited(cluster, running_agent, changes) as node:
        node.run([tenant("excepted", f"env | grep CUDA_MPS | sort; echo shown; {SLEEP}")])
        wait_line(node, "excepted", "shown")
        assert [line.split("=")[0] for line in lines(node, "excepted") if "CUDA_MPS" in line] == ["CUDA_MPS_PIPE_DIRECTORY"]
        said = "GpuLimitNotEnforced: nothing on this node keeps container main within its share (enforcement backend mps-open)"
        assert said in node.event("excepted", "GpuPlaced")
        assert exclusive() == [gpu_index(node, "excepted")]
    end_daemons()
