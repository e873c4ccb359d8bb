"""`gpumgr demo`: a simulated node, the real agent as a process of its own, and a script whose outcome is really checked.

node -> work -> script -> life -> play -> screen: `node` is the stage (the tests of the whole agent use it, too), `work` what containers do
there, `script` what happens and what must come out, `life` what goes on after it, `play` runs them, `screen` shows it.
"""
