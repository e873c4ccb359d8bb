"""HAMi-core: a library of the operator inside the container keeps cores and memory; the agent seeds, watches and repairs its region.

The region is a file that the container shares with the agent, and may write: nothing in it is believed, and it decides nothing about
anybody else. Layouts and offsets are the library's released ones (`layouts`).
"""
