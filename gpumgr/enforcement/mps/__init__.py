"""Backend "mps": NVIDIA's Multi-Process Service, one control daemon for each shared GPU, supervised by the agent.

errors, commands, injection, findings and launch are pure. control runs NVIDIA's program, folders and processes look at disk and
/proc, daemon is one GPU's daemon, supervisor all of them, backend what the rest of enforcement sees.
"""
