"""The container runtime over CRI v1, and the kernel's cgroups, which show to which container a process belongs."""
