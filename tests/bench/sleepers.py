"""Real processes that do nothing, as many as a node has on its GPUs: for /proc they are like any other.

`python -m tests.bench.sleepers COUNT [SOCKET...]` prints their pids as a JSON list, and they last until standard input ends. With
sockets (one for each process) each attaches to the MPS daemon that listens there (tests/data/enforcement/fake_mps_daemon.py).
"""

import json
import os
import signal
import socket
import sys


def sleep(path: str | None) -> None:
    """The whole life of one of them. One byte of the daemon's answer is proof enough."""
    if path is not None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(path)
        connection.sendall(json.dumps({"attach": {}, "as_user": None}).encode() + b"\n")
        connection.recv(1)
    os.write(1, b".")
    signal.pause()


def main() -> None:
    count, sockets = int(sys.argv[1]), sys.argv[2:]
    attached, told = os.pipe()
    pids = []
    for n in range(count):
        if (pid := os.fork()) == 0:
            os.dup2(told, 1)
            os.close(0)
            sleep(sockets[n] if sockets else None)
            os._exit(0)
        pids.append(pid)
    seen = 0
    while seen < count:
        seen += len(os.read(attached, count))
    print(json.dumps(pids), flush=True)
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
