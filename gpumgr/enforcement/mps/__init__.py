"""Backend "mps": NVIDIA's Multi-Process Service, one control daemon for each shared GPU, supervised by the agent.

`commands` has the commands of both protocols of MPS: 2, and 3 (driver r615 and newer). `daemon` is one GPU's daemon, `client_trial` tests
whether a daemon serves new clients, `supervisor` manages all daemons. `backend` implements the interface, also for containers without
limits ("mps-open"). `grace_periods` ends the clients of deleted pods.
"""
