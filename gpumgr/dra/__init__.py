"""The kubelet's side of dynamic resource allocation: the driver's gRPC services and their registration."""
