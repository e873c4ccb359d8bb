"""Publishes the agent's state to the API server: annotations of pods, the state of the node, events, evictions."""
