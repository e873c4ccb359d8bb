"""A mirror of the driver's libraries and programs for containers without NVIDIA's runtime (gpu-manager's volume manager)."""
