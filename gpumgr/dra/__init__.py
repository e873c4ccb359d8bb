"""The driver for Dynamic Resource Allocation: the kubelet's calls for ResourceClaims, registration, health, and the node's ResourceSlice."""
