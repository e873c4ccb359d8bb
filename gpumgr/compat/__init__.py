"""Migration from another GPU-sharing agent to gpumgr, one node at a time: what changes, in which order, and the way back.

Plans are pure functions of their inputs. Nothing here deletes or stops anything; the plan prints the commands for that.
"""
