"""The agent: the one writer of the ledger, and the ports through which the stations meet it."""
