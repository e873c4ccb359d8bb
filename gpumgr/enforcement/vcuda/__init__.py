"""Limits by a library in the container that looks like libcuda.so.1: gpu-manager's file and socket interface, made to hold.

One folder for each allocation, seen by the container as /etc/vcuda, read-only: `vcuda.config` (limits), `pids.config` (the host's
pids whose memory counts) and `vcuda.sock`, where each process registers before its first CUDA call goes through. The library itself is
the operator's; it knows CUDA 11 and older.
"""
