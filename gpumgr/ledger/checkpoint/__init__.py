"""The state that persists over restarts: the ledger, in sqlite. gpu-manager's checkpoint is read here, too."""
