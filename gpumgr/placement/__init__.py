"""The topology of the GPUs of a node, and the evaluators that choose among them."""
