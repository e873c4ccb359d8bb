"""From another GPU-sharing agent to gpumgr, one node at a time: what changes, in which order, and how to go back.

Plans are pure: values in, a plan out. Nothing here deletes or stops anything; what is somebody else's goes by commands that are printed.
"""
