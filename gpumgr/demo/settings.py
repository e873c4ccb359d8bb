"""The agent's settings on a simulated node: everything in one folder, nothing of this host."""

from collections.abc import Mapping
from pathlib import Path

from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.runtime import SimRuntime

Sections = Mapping[str, Mapping[str, object]]


def node_settings(
    folder: Path, name: str, sample_period_seconds: float, runtime: SimRuntime, api: SimApiServer | None, over: Sections
) -> Sections:
    """The content of the settings file, by section; `over` overrides the node's own settings. Without an API server (`api` None) the agent
    runs standalone."""
    kubeconfig = str(api.kubeconfig(folder / "kubeconfig")) if api is not None else None
    own: dict[str, dict[str, object]] = {
        "node": {"name": name},
        "kubelet": {
            "device_plugin_dir": str(folder / "device-plugins"),
            "pod_resources_socket": str(folder / "pod-resources" / "kubelet.sock"),
        },
        "checkpoint": {"dir": str(folder / "checkpoint"), "gpu_manager_checkpoint": str(folder / "gpu-manager.json")},
        "kubernetes": {"enabled": api is not None, "kubeconfig": kubeconfig},
        "nvml": {"sample_period_seconds": sample_period_seconds},
        "container": {"allocation_dir": str(folder / "vm")},
        # The GPUs are simulated, so nothing of this host may limit them: neither its MPS nor its containers.
        "enforcement": {"backend": "none", "run_dir": str(folder / "run"), "cdi_dir": str(folder / "cdi")},
        "mps": {"control_program": str(folder / "no-mps")},
        "cri": {"socket": str(runtime.socket), "cgroup_root": str(runtime.processes.cgroup_root)},
        "http": {"port": 0, "socket": str(folder / "agent.sock")},
        "display": {"socket": str(folder / "display.sock")},
        "log": {"format": "json"},
        "process": {"lock_path": str(folder / "agent.lock")},
    }
    return {section: {**own.get(section, {}), **over.get(section, {})} for section in {**own, **over}}
