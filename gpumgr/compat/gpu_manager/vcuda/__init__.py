"""Limits by a library that replaces libcuda.so.1 in the container, with gpu-manager's files and socket.

A container sees its allocation's folder read-only as /etc/vcuda. `vcuda.config` has the limits, and `pids.config` the pids of the
container's processes in the host's pid namespace. Each process registers at `vcuda.sock` before its first CUDA call. The operator supplies
the library, which supports CUDA 11.2 and older.
"""
