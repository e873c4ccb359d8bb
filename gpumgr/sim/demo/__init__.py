"""`gpumgr demo`: a simulated node, the real agent as a separate process, and a script with verified results.

`node` is the simulated node (tests use it, too), `workload` simulates what the node's containers do, `script` has the steps and their
expected results, and `runner` runs the steps.
"""
