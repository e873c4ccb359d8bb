"""The agent: the only writer of the ledger, and the interfaces that it needs from the other packages."""
