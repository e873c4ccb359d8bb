"""gpu-manager's interfaces: its driver files, its library vcuda, its display service, flags, metrics and checkpoint."""
