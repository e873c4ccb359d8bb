"""How commands reach the agent of this node, and what it answers."""
