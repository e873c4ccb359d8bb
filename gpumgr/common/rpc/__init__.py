"""gRPC over unix sockets: the wire format, a client channel, a server that lets calls in progress finish before it ends ("drains").
Independent of any API."""
