"""The use of GPUs by containers: the driver's sample joined with the containers of the node. Pure."""
