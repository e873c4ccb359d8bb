#!/usr/bin/env -S python3 -S
"""Behaves like nvidia-cuda-mps-control: a daemon for each pipe folder, both protocols, and a server process; no GPU.

Standard library only; fake_mps_daemon.py lies beside it. Beside NVIDIA's own options and commands it knows

    fake_mps_control.py attach     attaches as a CUDA program would (CUDA_MPS_PIPE_DIRECTORY and limits in the environment), prints
                                   one JSON line with what it got, and stays until its standard input ends.

FAKE_MPS_AS_USER is the user id that the daemon takes a client or a command for,

and FAKE_MPS_BEHAVIOUR names a JSON file, read at every step (it may change meanwhile):

    protocols         [2] or [2, 3], the default
    multiuser         false: neither option nor mode (default true)
    hang              first words of commands that never end ("-d" is one)
    garbage           text that every command answers
    refuse_start      text with which -d fails
    crash             first words of commands at which the daemon dies
    servers_outlive   true: servers stay when the daemon is killed
    pid_file          false: the daemon writes none, as those of drivers 470 and 535 (default true)
    tells_limits      false: knows no command that asks for limits (default true)
    knows_memory_limits  false: knows no command of memory limits in protocol 2, as driver 470 (default true)
    forget_limits     true: limits are accepted and not kept
    clients_hang      true: new clients wait for ever, as on a server of r615 that a killed client has blocked
    lasting_clients   pids of clients that can't be terminated
    sim_dir           folder of a simulated node (gpumgr/sim/library.py) whose driver lists the server, from its first client on, and
                      the clients
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # these are slow to import, and each command is a process
    from collections.abc import Sequence
    from typing import Any, NoReturn

PIPE = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
LOG = os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/tmp/nvidia-log")
_HELP = "usage: nvidia-cuda-mps-control [options]\n -d, --daemon\n -f, --foreground\n -v\n"
#: Driver r615 spells the option differently in each protocol and refuses the other spelling.
_MULTIUSER = {2: "--multiuser-server", 3: "--multiuser"}
_HELP_3 = " -p, --protocol <2|3>\n -q, --quit\nModules: server, namespace, client, device\n"


def behaviour(key: str, default: Any) -> Any:
    path = os.environ.get("FAKE_MPS_BEHAVIOUR")
    if not path or not os.path.exists(path):
        return default
    with open(path) as file:
        return json.load(file).get(key, default)


def main(words: Sequence[str]) -> None:
    if list(words) == ["attach"]:
        return attach()
    protocol, words = _protocol(list(words))
    _perhaps_hang(words[0] if words else "")
    newer = 3 in behaviour("protocols", [2, 3])
    if "-h" in words:
        multiuser = f" {_MULTIUSER[protocol]}  Enable multi-user mode\n" if behaviour("multiuser", True) else ""
        print(_HELP + multiuser + (_HELP_3 if protocol == 3 and newer else ""))
    elif protocol == 3 and not newer:
        _fail("Unrecognized option: -p")
    elif "-d" in words:
        options = [word for word in words if word != "-d"]
        if unknown := [word for word in options if not behaviour("multiuser", True) or word != _MULTIUSER[protocol]]:
            _fail(f"unrecognized option '{unknown[0]}'")
        start(protocol, bool(options))
    elif words:
        talk(["quit"] if words == ["-q"] else words)
    else:
        for line in sys.stdin:
            _perhaps_hang(line.split()[0])
            talk(line.split())
    return None


def _protocol(words: list[str]) -> tuple[int, list[str]]:
    """The environment wins over the option."""
    chosen = "2"
    for option in ("-p", "--protocol"):
        if option in words:
            at = words.index(option)
            chosen = words[at + 1]
            del words[at : at + 2]
    return int(os.environ.get("CUDA_MPS_PROTOCOL_VERSION", chosen)), words


def _perhaps_hang(word: str) -> None:
    if word in behaviour("hang", []):
        time.sleep(3600)


def _fail(text: str) -> NoReturn:
    print(text)
    sys.exit(1)


def _connect(name: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"{PIPE}/{name}")
    except OSError:
        connection.close()
        return None
    return connection


def talk(words: Sequence[str]) -> None:
    if (text := behaviour("garbage", None)) is not None:
        print(text)
        return
    connection = _connect("control_privileged") or _connect("control")
    if connection is None:
        _fail("Cannot find MPS control daemon process")
    request = {"words": words, "as_user": os.environ.get("FAKE_MPS_AS_USER")}
    connection.sendall(json.dumps(request).encode() + b"\n")
    answer = connection.makefile(buffering=1 << 20).readline()  # the rest of a packet is lost
    if not answer:
        _fail("Connection to the control daemon was lost")
    reply = json.loads(answer)
    if reply["text"]:
        print(reply["text"])
    if reply["status"]:
        sys.exit(reply["status"])


def attach() -> None:
    connection = _connect("control")
    if connection is None:
        _fail("no MPS daemon: a CUDA program would go on without MPS, and without limits")
    wanted = {key: value for key, value in os.environ.items() if key.startswith("CUDA_MPS_")}
    request = {"attach": wanted, "as_user": os.environ.get("FAKE_MPS_AS_USER")}
    connection.sendall(json.dumps(request).encode() + b"\n")
    print(connection.makefile(buffering=1 << 20).readline().strip(), flush=True)
    sys.stdin.read()


def start(protocol: int, multiuser: bool) -> NoReturn:
    if (text := behaviour("refuse_start", None)) is not None:
        _fail(text)
    if _connect("control") is not None:
        _fail("An instance of this daemon is already running")
    os.makedirs(PIPE, exist_ok=True)
    os.makedirs(LOG, exist_ok=True)
    ready, tell = os.pipe()
    os.set_inheritable(tell, True)
    daemon = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake_mps_daemon.py")
    argv = [sys.executable, "-S", daemon, str(protocol), str(int(multiuser)), str(tell)]
    if os.fork():
        os.close(tell)
        sys.exit(0 if os.read(ready, 1) else 1)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(ready)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    os.execv(sys.executable, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
