"""gRPC over unix sockets as the kubelet speaks it: the wire format, a client channel, a server that drains.

Nothing here knows the device plugin API. Stations on both sides of a socket use it (the plugin, the kubelet's stand-in).
"""
