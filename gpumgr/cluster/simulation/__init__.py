"""`gpumgr simulate`: replays pods on a described cluster, or places them on a snapshot. Pure: no I/O, no clock."""
