"""The API server's client, watches, the cache of this node's pods, and (in `publisher`) the writes about node and pods.

kubernetes_asyncio only reads kubeconfig files; everything else works on plain JSON.
"""
