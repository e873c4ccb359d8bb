"""Which process uses which GPU memory, in which container, and whether the container stays within its grant."""
