"""The daemon of fake_mps_control.py, which starts it: listens in the pipe folder, obeys commands, serves clients.

Without dataclasses, whose import takes a third of the start; tests start hundreds of daemons."""

import contextlib
import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PIPE = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
LOG = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/tmp/nvidia-log"))
_PID_FILE = PIPE / "nvidia-cuda-mps-control.pid"


def behaviour(key: str, default: Any) -> Any:
    path = os.environ.get("FAKE_MPS_BEHAVIOUR")
    try:
        return json.loads(Path(path).read_text()).get(key, default) if path else default
    except FileNotFoundError:
        return default


class Refused(Exception):
    """The command's error."""


class Limits:
    def __init__(self) -> None:
        self.percentage = 100.0
        self.memory: int | None = None


def tell_driver(gone: Iterable[int], fact: str = "") -> None:
    """Changes what the simulated driver of the folder `sim_dir` lists on this daemon's GPU: removes these pids, adds the fact
    (gpumgr/sim/control.py has the format)."""
    if not (folder := behaviour("sim_dir", None)):
        return
    gpus = (line.split() for line in Path(folder, "node.txt").read_text().splitlines() if line.startswith("gpu "))
    index = next(words[1] for words in gpus if words[2] == os.environ["CUDA_VISIBLE_DEVICES"])
    control, fresh = Path(folder, "control.txt"), Path(folder, "control.mps")
    Path(folder, "control.lock").touch()
    with Path(folder, "control.lock").open("r+b", buffering=0) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = control.read_text().splitlines() if control.exists() else []
        stale = {(kind, index, str(pid)) for kind in ("mpsserver", "mpsclient") for pid in gone}
        kept = [line for line in lines if tuple(line.split()[:3]) not in stale]
        kind, _, values = fact.partition(" ")
        fresh.write_text("".join(f"{line}\n" for line in [*kept, *([f"{kind} {index} {values}"] if fact else [])]))
        fresh.replace(control)
        changes = int.from_bytes(lock.read(8), sys.byteorder)
        lock.seek(0)
        lock.write((changes + 1).to_bytes(8, sys.byteorder))


class Server:
    """A child of the daemon with the real server's name. It ends with the daemon, since its standard input does."""

    def __init__(self, name: str, user: int, devices: str = "-") -> None:
        self.name, self.user, self.devices = name, user, devices
        self.limits = Limits()
        self.clients: dict[int, str] = {}
        program, *words = ("/bin/sleep", "3600") if behaviour("servers_outlive", False) else ("/bin/sh",)
        # A server of protocol 3 has a folder below the daemon's.
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(PIPE / self.name)}
        self.process = subprocess.Popen(
            ["nvidia-cuda-mps-server", *words],
            executable=program,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        # Popen returns when exec closes its pipe. The kernel sets the program's words and environment a moment later.
        with open(f"/proc/{self.process.pid}/environ", "rb", buffering=0) as shown:
            while not shown.read(1) and self.process.poll() is None:
                time.sleep(0.001)

    @property
    def pid(self) -> int:
        return self.process.pid

    def attach(self, pid: int, namespace: str) -> None:
        """The driver lists the server from its first client on."""
        tell_driver([self.pid], f"mpsserver {self.pid} {66 << 20}")
        tell_driver([pid], f"mpsclient {pid} {self.pid}")
        self.clients[pid] = namespace

    def detach(self, pid: int) -> None:
        self.clients.pop(pid, None)
        tell_driver([pid])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        tell_driver([self.pid, *self.clients])


class Namespace:
    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.limits = Limits()


class Daemon:
    def __init__(self, protocol: int, multiuser: bool) -> None:
        self.protocol, self.multiuser = protocol, multiuser
        self.defaults = Limits()
        self.servers: dict[str, Server] = {}
        self.namespaces: dict[tuple[str, str], Namespace] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()

    def serve(self, tell: int) -> None:
        """Writes a byte to the descriptor `tell` when it can be spoken to, and returns after `quit`."""
        if not (PIPE / "log").exists():
            os.mkfifo(PIPE / "log")
        self._listen(PIPE / "control", "default")
        if self.protocol == 2:
            (PIPE / "control_lock").touch()
            self._listen(PIPE / "control_privileged", "default")
        if behaviour("pid_file", True):
            _PID_FILE.write_text(f"{os.getpid()}\n")
        os.write(tell, b"1")
        os.close(tell)
        self._ended.wait()
        for server in self.servers.values():
            server.end()
        self._log("Exit with status 0")
        (PIPE / "log").unlink()
        if self.protocol == 2:  # the sockets stay, in protocol 3 the pid file too
            _PID_FILE.unlink(missing_ok=True)

    def _log(self, text: str) -> None:
        with (LOG / "control.log").open("a") as log:
            log.write(f"[{time.strftime('%F %T')}.000 Control{' INFO' if self.protocol == 3 else ''} {os.getpid():5}] {text}\n")

    def _listen(self, path: Path, namespace: str) -> socket.socket:
        """`namespace` is empty for connections to control_privileged."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(16)
        place = namespace if path.name == "control" else ""
        threading.Thread(target=self._accept, args=(listener, place), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket, namespace: str) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(connection, namespace), daemon=True).start()

    def _handle(self, connection: socket.socket, namespace: str) -> None:
        line = connection.makefile(buffering=1 << 20).readline()
        if not line:
            return
        request = json.loads(line)
        pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if "attach" in request:
            self._attach(connection, pid, int(request["as_user"] or user), namespace, request["attach"])
            return
        words = request["words"]
        self._log(("Cmd:" if self.protocol == 2 else "Received command: ") + " ".join(words))
        if words[0] in behaviour("crash", []):
            os._exit(139)
        with self._lock:
            try:
                self._check_privileges(words, int(request.get("as_user") or user), privileged=not namespace)
                status, text = 0, self.obey(words)
            except Refused as refused:
                # Refusals of protocol 2 have the exit status 0.
                status, text = 0, str(refused)
                if self.protocol == 3:
                    status, text = 1, f"Error: {refused}\nFailed to execute {' '.join(words[:2]).upper()}"
        connection.sendall(json.dumps({"status": status, "text": text}).encode() + b"\n")
        if words[0] == "quit" and "privilege" not in text:
            self._ended.set()

    def _check_privileges(self, words: Sequence[str], user: int, *, privileged: bool) -> None:
        """In protocol 2 the socket matters: a running server's limits can be set through both. In protocol 3 the user matters."""
        if self.protocol == 2 and not privileged and words[0] == "quit":
            raise Refused("Not enough privilege to execute quit command")
        if self.protocol == 2 and not privileged and words[0].startswith("set_default_"):
            raise Refused(
                f"Insufficient privileges for UID {user}. Control deamon settings can only be modified by the user started it or by the "
                "root user."
            )
        if self.protocol == 3 and user not in (0, os.getuid()) and "list" not in words:
            raise Refused(f"Insufficient privileges for UID {user}. '{' '.join(words[:2]).upper()}' requires root.")

    # -- clients ---------------------------------------------------------------------------------------------------------------

    def _attach(self, connection: socket.socket, pid: int, user: int, namespace: str, wanted: dict[str, str]) -> None:
        server = self._server_for(user)
        if behaviour("clients_hang", False):
            self._ended.wait()
            return
        named = self.namespaces.get((server.name, namespace))
        limits = named.limits if named else server.limits
        percentage, memory = limits.percentage, limits.memory
        asked = wanted.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        if asked and named is None:  # a namespace's value overrides the client's
            percentage = min(percentage, float(asked))
        pinned = re.fullmatch(r"0=(.+)", wanted.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", ""))
        if pinned:
            memory = min(_size(pinned.group(1)), 1 << 62 if memory is None else memory)
        server.attach(pid, namespace)
        got = {"server": server.pid, "namespace": namespace, "percentage": percentage, "memory": memory}
        connection.sendall(json.dumps(got).encode() + b"\n")
        connection.recv(1)
        server.detach(pid)

    def _server_for(self, user: int) -> Server:
        """Waits while another user's clients are served, unless in multi-user mode."""
        user = 0 if self.multiuser else user
        while True:
            with self._lock:
                server = next(iter(self.servers.values()), None)
                if server is not None and (self.protocol == 3 or server.user == user):
                    return server
                if server is not None and not server.clients:
                    server.end()
                    self.servers.clear()
                if not self.servers:
                    server = Server(name="", user=user)
                    server.limits.percentage, server.limits.memory = self.defaults.percentage, self.defaults.memory
                    self.servers[str(server.pid)] = server
                    return server
            time.sleep(0.02)

    # -- commands --------------------------------------------------------------------------------------------------------------

    def obey(self, words: Sequence[str]) -> str:
        if words[0] == "quit":
            return "Quit accepted; shutting down the MPS control daemon." if self.protocol == 3 else ""
        if "pinned_mem" in words[0] and not behaviour("knows_memory_limits", True):
            raise Refused(f'Unknown command "{words[0]}"')
        if words[0] == "terminate_client" and self.protocol == 2:
            if int(words[2]) in behaviour("lasting_clients", []):
                raise Refused(f"Failed to terminate client {words[2]}")
            self._known(words[1]).detach(int(words[2]))
            return ""
        if self.protocol == 2:
            return self._obey_2(*words)
        positional = [word for word in words if not word.startswith("--")]
        options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
        return self._obey_3(positional, options)

    def _obey_2(self, command: str, *values: str) -> str:
        match command, *values:
            case ["get_server_list"]:
                return "\n".join(self.servers)
            case ["get_client_list", pid]:
                return "\n".join(map(str, self._known(pid).clients))
            case ["set_default_active_thread_percentage", value]:
                if 0 < float(value) <= 100 and not behaviour(
                    "forget_limits", False
                ):  # another value changes nothing and is no error
                    self.defaults.percentage = float(value)
                return f"{self.defaults.percentage}"
            case ["get_default_active_thread_percentage"] if behaviour("tells_limits", True):
                return f"{self.defaults.percentage}"
            case ["set_default_device_pinned_mem_limit", "0", value]:
                self.defaults.memory = _size(value)
            case ["get_default_device_pinned_mem_limit", "0"] if behaviour("tells_limits", True):
                return _shown(self.defaults.memory) if self.defaults.memory else ""
            case ["set_active_thread_percentage", pid, value]:
                self._known(pid).limits.percentage = float(value)
            case ["set_device_pinned_mem_limit", pid, "0", value]:
                self._known(pid).limits.memory = _size(value)
            case ["get_active_thread_percentage", pid] if behaviour("tells_limits", True) is True:
                return f"{self._known(pid).limits.percentage}"
            case ["get_device_pinned_mem_limit", pid, "0"] if behaviour("tells_limits", True) is True:
                memory = self._known(pid).limits.memory
                return _shown(memory) if memory else ""
            case _:
                raise Refused(f'Unknown command "{command}"')
        return ""

    def _obey_3(self, words: Sequence[str], options: dict[str, str]) -> str:
        owner = options.get("server", "")
        match words:
            case [_, "list"] if options.get("format") != "csv,noheader":
                raise Refused("a table for people, which this fake does not have")
            case ["server", "create", name]:
                self._create_server(name, options.get("uid", "0"), options.get("allowed-devices", "-"))
            case ["server", "list"]:
                servers = self.servers.values()
                return _csv((s.name, s.user, s.pid, "Busy", PIPE / s.name, s.devices, "-") for s in servers)
            case ["namespace", "create", name]:
                self._create_namespace(owner, name)
            case ["namespace", "delete", name]:
                self._delete_namespace(owner, name, "force" in options)
            case ["namespace", "list"]:
                self._known(owner)
                return _csv(self._namespace_rows(owner))
            case ["namespace", "set", name]:
                self._limit(self._namespace(owner, name).limits, options)
            case ["client", "list"]:
                known = [s for s in self.servers.values() if owner in ("", s.name)]
                return _csv((pid, s.name, 0, space, "a program") for s in known for pid, space in s.clients.items())
            case ["client", "terminate", pid]:
                owners = [server for server in self.servers.values() if int(pid) in server.clients]
                if not owners or int(pid) in behaviour("lasting_clients", []):
                    raise Refused(f"Failed to terminate client {pid}")
                owners[0].detach(int(pid))
            case _:
                raise Refused(f"Unknown command: {' '.join(words)}")
        return ""

    def _create_server(self, name: str, user: str, devices: str) -> None:
        _check_name(name)
        if name in self.servers:
            raise Refused(f"Server '{name}' already exists")
        if self.multiuser and user != "0":
            raise Refused("Only uid 0 is allowed in multiuser mode")
        self.servers[name] = Server(name=name, user=int(user), devices=devices)
        self._listen(PIPE / name / "control", "default")
        self._listen(PIPE / name / "default" / "control", "default")

    def _create_namespace(self, owner: str, name: str) -> None:
        _check_name(name)
        self._known(owner)
        if (owner, name) in self.namespaces:
            raise Refused(f"Namespace '{name}' already exists")
        self.namespaces[owner, name] = Namespace(self._listen(PIPE / owner / name / "control", name))

    def _delete_namespace(self, owner: str, name: str, force: bool) -> None:
        namespace = self._namespace(owner, name)
        if name in self._known(owner).clients.values() and not force:
            raise Refused("Namespace has active clients")
        namespace.listener.close()
        (PIPE / owner / name / "control").unlink()
        with contextlib.suppress(OSError):
            (PIPE / owner / name).rmdir()
        del self.namespaces[owner, name]

    def _limit(self, limits: Limits, options: dict[str, str]) -> None:
        if behaviour("forget_limits", False):
            return
        if "active-thread-percentage" in options:
            limits.percentage = float(options["active-thread-percentage"])
        if "pinned-memory-limit" in options:
            limits.memory = _size(options["pinned-memory-limit"])

    def _namespace_rows(self, owner: str) -> Iterable[Sequence[object]]:
        for (of, name), namespace in self.namespaces.items():
            if of == owner:
                limits = namespace.limits
                yield name, owner, "Busy", _shown(limits.memory), f"{limits.percentage:.2f}", 0, PIPE / owner / name
        yield "default", owner, "Busy", "unlimited", "100.00", 0, PIPE / owner / "default"

    def _known(self, name: str) -> Server:
        if name not in self.servers:
            raise Refused(f"Server {name} not found" if self.protocol == 2 else f"Server '{name}' not found")
        return self.servers[name]

    def _namespace(self, owner: str, name: str) -> Namespace:
        if (owner, name) not in self.namespaces:
            raise Refused(f"Namespace '{name}' not found")
        return self.namespaces[owner, name]


def _check_name(name: str) -> None:
    if not re.fullmatch("[a-z0-9_]{1,64}", name):
        raise Refused(f"Invalid namespace name '{name}'")


def _size(text: str) -> int:
    return int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]]


def _shown(value: int | None) -> str:
    if value is None:
        return "unlimited"
    return f"{value >> 30}G" if value % (1 << 30) == 0 else f"{value >> 20}M"


def _csv(rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(",".join(map(str, row)) for row in rows)


if __name__ == "__main__":
    Daemon(protocol=int(sys.argv[1]), multiuser=sys.argv[2] == "1").serve(int(sys.argv[3]))
