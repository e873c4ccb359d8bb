"""What is written to the API server: gathered, coalesced and bounded in memory, sent by one task at a modest pace."""
