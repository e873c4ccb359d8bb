"""The composition root: builds the object graph of the agent, starts its parts in order, and stops them in reverse order."""
