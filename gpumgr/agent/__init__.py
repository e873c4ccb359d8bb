"""The agent: the only writer of the ledger, and the interfaces that other packages implement for it."""
