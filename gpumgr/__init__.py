"""gpumgr: shares NVIDIA GPUs between Kubernetes pods. See README.md, "How it is built", for the map of this package."""

__version__ = "0.1.0"
