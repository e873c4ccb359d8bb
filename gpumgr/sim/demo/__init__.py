"""`gpumgr demo`: a simulated node, the real agent as a separate process, and a script with verified results.

`node` is the simulated node (also for tests of the whole agent), `workload` what its containers do, `script` the steps with their expected
results; `runner` runs and displays them.
"""
