"""`gpumgr simulate`: replays pods on a described cluster under a placement policy. Pure: no I/O, no clock."""
