"""The API server's client: a cache of this node's pods, and (in `publisher`) what is written.

kubernetes_asyncio is used for credentials and transport only; everything above it works on plain JSON.
"""
