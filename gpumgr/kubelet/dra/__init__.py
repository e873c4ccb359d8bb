"""The driver for Dynamic Resource Allocation (DRA): the kubelet's calls for ResourceClaims, and what the node offers."""
