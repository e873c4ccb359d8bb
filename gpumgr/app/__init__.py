"""The composition root: builds the stations around the agent, starts them in order, stops them in reverse."""
