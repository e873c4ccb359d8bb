"""Limits by a library that replaces libcuda.so.1 in the container, with gpu-manager's files and socket.

Each allocation has a folder, which its container sees read-only as /etc/vcuda: `vcuda.config` (the limits), `pids.config` (the host's
pids of the processes; the library counts their GPU memory) and `vcuda.sock`, where each process registers before its first CUDA call. The
operator supplies the library, which supports CUDA 11.2 and older.
"""
