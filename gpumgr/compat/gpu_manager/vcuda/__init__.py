"""Limits by a library that replaces libcuda.so.1 in the container, with gpu-manager's files and socket.

A container sees its allocation's folder read-only as /etc/vcuda: `vcuda.config` has the limits, `pids.config` the host's pids of its
processes, and each process registers at `vcuda.sock` before its first CUDA call. The operator supplies the library, which supports CUDA
11.2 and older.
"""
