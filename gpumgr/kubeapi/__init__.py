"""This node's pods as the API server tells them. kubernetes_asyncio is the transport only; everything above it works on plain JSON."""
