"""Backend "mps": NVIDIA's Multi-Process Service, one control daemon for each shared GPU, supervised by the agent.

`commands` is pure. `findings` observes the running containers. `launcher` makes the command lines that start daemons.
`folders` and `processes` read the disk and /proc. `control` finds and runs NVIDIA's control program, also from a pod. `limits` sets the
limits of containers in both protocols of MPS: 2, and 3 (driver r615 and newer). `compute_mode` sets the GPU's compute mode. `daemon` is one
GPU's daemon, and `supervisor` manages all daemons. `backend` implements the interface, also for containers without limits ("mps-open").
`grace_periods` ends the clients of deleted pods.
"""
