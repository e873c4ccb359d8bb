"""A node with a driver that limits the memory of cgroups, and a hierarchy of such cgroups."""

from pathlib import Path

NEW_NODE = """
about: two GPUs and a driver that limits the memory of cgroups
driver_version: 615.71.09
cuda_version: 13.4
models:
  h100: {model: NVIDIA H100 80GB HBM3, memory_mib: 81559, mig: disabled}
gpus:
  - {model: h100, bus_id: 0000:18:00.0, pcie: [pci0000:15]}
  - {model: h100, bus_id: 0000:2a:00.0, pcie: [pci0000:26]}
"""


def lay_out_cgroups(root: Path) -> Path:
    """A container that the dmem controller is handed down to, and a child of it that it is not."""
    (root / "kubepods/container/child").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpuset cpu io memory pids dmem\n")
    (root / "cgroup.subtree_control").write_text("cpuset cpu io memory pids\n")
    for name in ("kubepods", "kubepods/container"):
        (root / name / "dmem.max").touch()
    return root
