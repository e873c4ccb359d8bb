"""The agent's decisions behind real sockets: our device-plugin servers and the simulated kubelet, in one event loop."""
