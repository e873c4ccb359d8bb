"""The driver's libraries and programs, mirrored for containers that get no NVIDIA runtime (gpu-manager's volume manager)."""
