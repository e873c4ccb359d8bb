"""Backend "mps": NVIDIA's Multi-Process Service, one control daemon for each shared GPU, supervised by the agent.

Pure: commands, findings, launcher. On disk and in /proc: folders, processes. Programs: control finds and runs NVIDIA's control program,
also from a pod. limits sets the limits of both protocols. daemon is one GPU's daemon, probe tries one before containers use it,
supervisor manages all of them, and backend implements the interface, also for containers without limits ("mps-open").
"""
