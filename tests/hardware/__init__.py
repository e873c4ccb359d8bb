"""Measures the limits on a machine with an NVIDIA GPU: `make hardware` (root, 12 minutes at most, no cluster needed).

The agent runs as shipped, on the machine's driver; the kubelet and the container runtime are simulated. A tenant is a process, not a
container: it gets the environment of the agent's answer, and what a container would have mounted by the paths of the host.
"""
