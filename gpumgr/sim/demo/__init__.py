"""`gpumgr demo`: a simulated node, the real agent as a separate process, and a script with verified results.

node -> workload -> script -> activity -> runner -> screen: `node` is the simulated node (the tests of the whole agent use it too),
`workload` what its containers do, `script` the steps with their expected results, `activity` what continues after the script, `runner`
runs them, `screen` displays them.
"""
