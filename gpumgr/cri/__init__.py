"""The container runtime over CRI v1, and the kernel's cgroups: which process belongs to which container."""
