"""`gpumgr demo`: a simulated node, the real agent as a process of its own, and a script whose outcome is really checked.

node -> script -> play -> screen: `node` is the stage (the tests of the whole agent use it, too), `script` what happens there and what
must come out, `play` runs it, `screen` shows it.
"""
