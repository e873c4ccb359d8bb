"""The scheduler's view of a cluster's GPUs: nodes, requests of pods, the choice of node and GPUs, and its explanation. Pure."""
