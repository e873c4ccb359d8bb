"""gRPC over unix sockets, for any API: the wire format, a client, and a server that lets running calls finish before it ends."""
