"""Backend "mps": NVIDIA's Multi-Process Service, one control daemon for each shared GPU, supervised by the agent.

errors, commands, injection, findings, caveats and launch are pure. control runs NVIDIA's program, talk asks one daemon by it, folders,
records and processes look at disk and /proc, program for NVIDIA's program, here or from a pod on its host. bounds and namespaces put
limits, by protocol 2 and 3. daemon is one GPU's daemon, supervisor all of them, backend what the rest of enforcement sees, exempt the
same for containers without limits.
"""
