"""The API server's client: the cache of this node's pods, and (in `publisher`) all writes.

kubernetes_asyncio only reads kubeconfig files; everything else works on plain JSON.
"""
