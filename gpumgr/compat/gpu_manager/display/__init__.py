"""gpu-manager's view of the node, for programs that were written for it: the gRPC service display.GPUDisplay and its messages as JSON."""
