"""The composition root: builds the agent's object graph, starts its parts in order, and stops them."""
