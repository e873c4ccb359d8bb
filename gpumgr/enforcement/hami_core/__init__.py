"""HAMi-core: the operator's library in the container limits cores and memory; the agent makes, monitors and repairs its region.

The region is a file that the container shares with the agent and can write. Nothing in it is trusted, or affects other containers.
"""
