"""Which process uses which GPU memory, which container it belongs to, and whether the container stays within its grant."""
