"""What concerns more than one node: the scheduler extender, the claims controller, the simulation, and the pure core that they share."""
