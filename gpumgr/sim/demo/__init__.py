"""`gpumgr demo`: a simulated node, the real agent as a separate process, and a script with verified results.

`node` is the simulated node (also for tests), `workload` what its containers do, `script` the steps with their results; `runner` runs them.
"""
