"""Pods on a real kubelet: a one-node cluster with its own containerd, and the agent on it."""
