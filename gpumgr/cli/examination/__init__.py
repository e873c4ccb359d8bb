"""`gpumgr doctor`: checks everything that the agent needs on a node and prints problems with their remedies. It changes nothing."""
