"""What the agent remembers over restarts: its ledger in sqlite, durable before anybody sees a decision; gpu-manager's file is read."""
