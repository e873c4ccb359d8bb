"""gpumgr: shares NVIDIA GPUs between Kubernetes pods. The map of this package is in docs/design.md."""

__version__ = "0.1.0"
