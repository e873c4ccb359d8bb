"""`gpumgr demo`: a simulated node, the real agent as a separate process, and a script with verified results.

node -> workload -> script -> runner: `node` is the simulated node (the tests of the whole agent use it too), `workload` is what its
containers do, during the script and afterwards, `script` has the steps with their expected results, and `runner` runs and displays them.
"""
