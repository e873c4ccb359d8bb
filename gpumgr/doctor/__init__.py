"""`gpumgr doctor`: looks at everything that the agent needs of a node, and says what is wrong and what to do. It changes nothing."""
