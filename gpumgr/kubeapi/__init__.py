"""This node's pods as the API server tells them, and (in `writer`) what it is told.

kubernetes_asyncio is the transport only; everything above it works on plain JSON.
"""
