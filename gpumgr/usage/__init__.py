"""Who uses what: the driver's sample joined with the containers of the node. Pure; a picture of one instant."""
