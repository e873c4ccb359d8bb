"""The checks of `gpumgr doctor`: what the agent needs on a node, and the scheduler in a cluster. They change nothing."""
