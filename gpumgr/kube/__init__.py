"""The API server's client, watches, the cache of this node's pods, and (in `publisher`) writes to pods and the node."""
