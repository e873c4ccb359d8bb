"""Running containers: which process uses which GPU memory, whether each container stays within its grant, resizes, bursts, suspensions."""
