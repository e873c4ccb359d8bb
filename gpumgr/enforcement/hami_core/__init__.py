"""HAMi-core: the operator's library inside the container limits cores and memory; the agent makes, monitors and repairs its region.

The region is a file that the container shares with the agent and can write: nothing in the region is trusted, and nothing in it affects
other containers. Its offsets are the library's (`layout`).
"""
