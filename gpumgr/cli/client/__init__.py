"""How commands reach this node's agent, and its answers."""
