"""Publishes the agent's state to the API server: pod annotations, node labels and condition, events, evictions."""
