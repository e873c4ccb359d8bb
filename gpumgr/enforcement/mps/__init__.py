"""Backend "mps": NVIDIA's Multi-Process Service, one control daemon for each shared GPU, supervised by the agent.

Pure: commands, injection, findings, launcher. On disk and in /proc: folders, records, processes. Programs: control runs NVIDIA's control
program, control_program finds it, also from a pod. limits sets the limits of both protocols. daemon is one GPU's daemon, probe tries one
before containers use it, supervisor manages all of them, backend implements the interface, and unlimited the same for containers without
limits.
"""
