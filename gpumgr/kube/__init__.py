"""The API server's client: a cache of this node's pods, and (in `publisher`) what is written.

kubernetes_asyncio only reads kubeconfig files; everything else works on plain JSON.
"""
