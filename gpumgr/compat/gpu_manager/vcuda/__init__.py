"""Limits by a library in the container in the place of libcuda.so.1, with gpu-manager's files and socket.

Each allocation has a folder, which its container sees read-only as /etc/vcuda: `vcuda.config` (the limits), `pids.config` (the host's
pids of the processes with GPU memory that counts) and `vcuda.sock`, where each process registers before its first CUDA call. The operator
supplies the library; it supports CUDA 11.2 and older.
"""
