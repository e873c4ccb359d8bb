"""The state that persists over restarts: the ledger, in sqlite."""
