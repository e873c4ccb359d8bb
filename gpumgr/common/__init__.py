"""Small tools without a domain, the errors and units of all parts, and gRPC over unix sockets."""
