"""Where the end-to-end cluster keeps things, and what it is called."""

import os
from pathlib import Path
from typing import Final

KUBERNETES: Final = "1.37.2"
CONTAINERD: Final = "2.4.2"
#: One test runs a kubelet of this version, with the containerd of Debian.
OLDER_KUBELET: Final = "1.35.4"
NODE: Final = "e2e-node"
IMAGE: Final = "gpumgr.invalid/busybox:e2e"

#: All state of a run. Short: containerd makes sockets below it, and a socket's path has 108 bytes at most.
STATE: Final = Path("/run/gpumgr-e2e")
#: What the agent must not lose lies on a disk, as on a real node (`/run` is memory on many).
AGENT_STATE: Final = Path("/var/lib/gpumgr-e2e")
#: Held for as long as a harness lives; the system lets go of it when the harness is killed.
LOCK: Final = Path("/run/gpumgr-e2e.lock")

#: The kubelet uses this folder for device plugins with any root folder.
DEVICE_PLUGINS: Final = Path("/var/lib/kubelet/device-plugins")
KUBELET_ROOT: Final = STATE / "kubelet"
POD_RESOURCES: Final = KUBELET_ROOT / "pod-resources" / "kubelet.sock"
POD_LOGS: Final = STATE / "pod-logs"
CONTAINER_LOGS: Final = Path("/var/log/containers")
#: In a folder of its own: an agent in a pod has that folder mounted.
CONTAINERD_SOCKET: Final = STATE / "cri" / "containerd.sock"
#: What service accounts asked of the API server, one JSON document a line.
AUDIT_LOG: Final = STATE / "logs" / "audit.log"
#: The agent's folder for sockets and regions; as on a real node it is memory.
RUN_DIR: Final = STATE / "run"
#: Where the container runtime reads CDI specs.
CDI_SPECS: Final = RUN_DIR / "cdi"
#: Distinguishes one boot of the machine from the next; a test that simulates a boot mounts a file of its own here.
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
CGROUPS: Final = Path("/sys/fs/cgroup")

HERE: Final = Path(__file__).resolve().parent
PROJECT: Final = HERE.parent.parent
GO: Final = HERE / "go"
GO_CONTAINERD: Final = HERE / "go_containerd"
GO_OLDER: Final = HERE / "go_older"
GO_HELM: Final = HERE / "go_helm"
GO_CRDS: Final = HERE / "go_crds"


def cache() -> Path:
    """Folder of the binaries, outside the tree and named by version, so that the second run builds nothing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpumgr-e2e" / KUBERNETES
