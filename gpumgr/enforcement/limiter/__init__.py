"""The limiter: a library in each process of a container, an arbiter for each node, and the pages that they share with the agent."""
