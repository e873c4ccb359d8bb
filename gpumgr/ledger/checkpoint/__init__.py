"""The state that persists over restarts: the ledger, in sqlite. It also reads gpu-manager's checkpoint."""
