"""The agent's settings with every path in one folder, so that it uses nothing else of this host."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]


def changed(settings: Sections, changes: Sections) -> dict[str, dict[str, Any]]:
    """`changes` go over the settings, key by key."""
    return {section: {**settings.get(section, {}), **changes.get(section, {})} for section in {**settings, **changes}}


def settings_in(folder: Path, changes: Sections) -> dict[str, dict[str, Any]]:
    own: Sections = {
        "kubelet": {
            "device_plugin_dir": str(folder / "device-plugins"),
            "pod_resources_socket": str(folder / "pod-resources" / "kubelet.sock"),
        },
        "checkpoint": {"dir": str(folder / "checkpoint"), "gpu_manager_checkpoint": str(folder / "none")},
        "container": {
            "allocation_dir": str(folder / "vm"),
            "driver_share_dir": str(folder / "vdriver" / "nvidia"),
            "driver_whole_dir": str(folder / "vdriver" / "origin"),
        },
        "enforcement": {"run_dir": str(folder / "run"), "cdi_dir": str(folder / "cdi")},
        "cri": {"socket": str(folder / "cri.sock")},
        "http": {"port": 0, "socket": str(folder / "agent.sock")},
        "display": {"socket": str(folder / "display.sock")},
        "process": {"lock_path": str(folder / "agent.lock")},
    }
    return changed(own, changes)
