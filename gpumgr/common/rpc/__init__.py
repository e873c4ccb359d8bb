"""gRPC over unix sockets: the wire format, a client channel, a server that drains. Independent of any API."""
