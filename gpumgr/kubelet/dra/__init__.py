"""The driver for Dynamic Resource Allocation (DRA): the kubelet's calls for ResourceClaims, and what the node offers."""

from typing import Final

#: The driver's name, in claims, slices and the kubelet's folders.
DRIVER: Final = "gpu.gpumgr.io"
