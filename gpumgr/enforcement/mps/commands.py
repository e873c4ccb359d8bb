"""Commands and answers of `nvidia-cuda-mps-control` in both protocols, and the choice of the protocol.

Protocol 2 takes commands on standard input, protocol 3 as `module verb` words. Sources: NVIDIA's MPS documentation r615 ("Legacy MPS v2
Interface", "MPS v3 Interface", "MPS v3 Namespaces", "Environment Variables"), nvidia-cuda-mps-control(1), and the answers in NVIDIA's guide
"Per-GPU Compute and Memory Limits with MPS".
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from gpumgr.common.errors import MpsError

MpsProtocol = Literal[2, 3]
ProtocolSetting = Literal["auto", "2", "3"]
PROTOCOLS: Final[Mapping[str, MpsProtocol]] = {"2": 2, "3": 3}

#: A daemon's only server in protocol 3, where names have at most 64 lower-case letters, digits and "_".
SERVER: Final = "gpu"
#: Every server has this namespace, without limits. Clients reach it by `<pipe>/gpu/control` or `<pipe>/gpu/default/control`; containers
#: have neither.
DEFAULT_NAMESPACE: Final = "default"
_NAME = re.compile(r"[a-z0-9_]{1,64}\Z")
_PLAIN: Final = "--format=csv,noheader"
_MEBIBYTE: Final = 1 << 20
_MULTIUSER: Final = re.compile(r"(?<![\w-])(--?multiuser(?:-server)?)(?![\w-])")
#: Refusals of protocol 2 have the exit status 0. Seen with drivers 470 to 615.
_REFUSAL: Final = re.compile(
    r"^(?:Unknown command|Server \d+ not found|Insufficient privilege|Not enough privilege|Invalid|Error|Failed).*",
    re.MULTILINE | re.IGNORECASE,
)
#: Units are powers of 1024.
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?")
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the program with the arguments `words` and the standard input `text`."""

    words: tuple[str, ...] = ()
    text: str = ""

    def __str__(self) -> str:
        return "; ".join(self.text.splitlines()) or " ".join(self.words)


#: The program's protocols, each with the option by which one server serves clients of all users ("": none).
ControlFeatures = Mapping[MpsProtocol, str]


def parse_help(plain: str, with_protocol_3: str) -> ControlFeatures:
    """Parses the output of `-h` and `-p 3 -h`. Driver r615 spells the option `--multiuser-server` in protocol 2 and `--multiuser` in
    protocol 3, and refuses the other spelling."""
    helps: dict[MpsProtocol, str] = {2: plain}
    if all(re.search(rf"\b{word}\b", with_protocol_3) for word in ("server", "namespace")):
        helps[3] = with_protocol_3
    return {protocol: found[1] if (found := _MULTIUSER.search(text)) else "" for protocol, text in helps.items()}


def is_help(text: str) -> bool:
    """Whether this may be the program's help: it names MPS and the option that starts the daemon. Drivers 470 to 550 print another text."""
    return re.search("mps", text, re.IGNORECASE) is not None and re.search(r"(?<![\w-])(-d|--daemon)(?![\w-])", text) is not None


def choose_protocol(setting: ProtocolSetting, features: ControlFeatures, kept: MpsProtocol | None) -> MpsProtocol:
    """The node's protocol. `kept`: the protocol of the existing containers; None: there are none. Raises MpsError.

    The protocol stays while any container has it, because what a container got at its start can't be changed, not even by a reboot. A
    drained node gets the newer protocol.
    """
    wanted = kept or PROTOCOLS.get(setting, max(features))
    if wanted not in features:
        why = "containers of this node use it: drain the node" if kept else "mps.protocol asks for it: set it to auto"
        raise MpsError(
            f"the installed nvidia-cuda-mps-control does not support MPS protocol {wanted} (driver r615 and newer do), and {why}"
        )
    return wanted


# -- the daemon ------------------------------------------------------------------------------------------------------------


def start_arguments(protocol: MpsProtocol, multiuser_option: str) -> tuple[str, ...]:
    words = ("-d", "-p", "3") if protocol == 3 else ("-d",)
    return (*words, multiuser_option) if multiuser_option else words


def quit_daemon(protocol: MpsProtocol, patience_seconds: int) -> Command:
    """Ends the daemon and its servers; in protocol 2, servers with clients after `patience_seconds`."""
    return Command(words=("-q",)) if protocol == 3 else Command(text=f"quit -t {patience_seconds}\n")


def environment(protocol: MpsProtocol, uuid: str, pipe: Path, log: Path) -> Mapping[str, str]:
    """The environment of the daemon and of the programs that connect to it. The daemon sees one GPU, with the index 0.

    CUDA_MPS_PROTOCOL_VERSION overrides the option `-p`, so it is always set here.
    """
    return {
        "CUDA_VISIBLE_DEVICES": uuid,
        "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
        "CUDA_MPS_LOG_DIRECTORY": str(log),
        "CUDA_MPS_PROTOCOL_VERSION": str(protocol),
    }


def list_servers(protocol: MpsProtocol) -> Command:
    return Command(words=("server", "list", _PLAIN)) if protocol == 3 else Command(text="get_server_list\n")


def parse_servers(protocol: MpsProtocol, answer: str) -> Mapping[str, int | None]:
    """name -> pid (None: no process yet). In protocol 2 the name is the pid. Raises MpsError."""
    if protocol == 2:
        return {str(pid): pid for pid in parse_pids(answer)}
    return {name: int(pid) if pid.isdigit() and int(pid) else None for name, _, pid, *_ in _rows(answer, 4)}


def list_clients(protocol: MpsProtocol, server_pid: int) -> Command:
    if protocol == 3:
        return Command(words=("client", "list", f"--server={SERVER}", _PLAIN))
    return Command(text=f"get_client_list {server_pid}\n")


def parse_clients(protocol: MpsProtocol, answer: str) -> Mapping[int, str | None]:
    """pid -> namespace (None in protocol 2). Raises MpsError."""
    if protocol == 2:
        return dict.fromkeys(parse_pids(answer))
    return {_number(pid, answer): namespace for pid, _, _, namespace, *_ in _rows(answer, 4)}


def terminate_client(protocol: MpsProtocol, server_pid: int, client_pid: int) -> Command:
    """Protocol 2: the client's next call of CUDA returns 810 (CUDA_ERROR_MPS_CLIENT_TERMINATED), as measured with driver 580 on an H200.
    Protocol 3: as documented ("MPS v3 Interface", section "Client"), not measured."""
    if protocol == 3:
        return Command(words=("client", "terminate", str(client_pid)))
    return Command(text=f"terminate_client {server_pid} {client_pid}\n")


# -- protocol 2: one outer bound for all clients of a daemon ---------------------------------------------------------------


def set_bound(server: int | None, cores: int, memory_bytes: int) -> tuple[Command, ...]:
    """Limits new clients of a server, independent of their environment. `server` None: defaults for future servers."""
    which, default = _server_words(server)
    return (
        Command(text=f"set_{default}active_thread_percentage{which} {cores}\n"),
        Command(text=f"set_{default}device_pinned_mem_limit{which} 0 {_megabytes(memory_bytes)}\n"),
    )


def _server_words(server: int | None) -> tuple[str, str]:
    """Returns the argument that selects the server, and the part of the command's name for future servers."""
    return (f" {server}", "") if server is not None else ("", "default_")


def bounds_of(servers: Sequence[int | None]) -> Command:
    """Queries the two limits of each server (None: the defaults), one line for each."""
    lines: list[str] = []
    for server in servers:
        which, default = _server_words(server)
        lines += f"get_{default}active_thread_percentage{which}\n", f"get_{default}device_pinned_mem_limit{which} 0\n"
    return Command(text="".join(lines))


def parse_bounds(servers: Sequence[int | None], answer: str) -> Mapping[int | None, str]:
    """server -> its two lines; empty if the number of lines does not match."""
    lines = answer.splitlines()
    if len(lines) != 2 * len(servers):
        return {}
    return {server: "\n".join(lines[2 * n :][:2]) for n, server in enumerate(servers)}


def _megabytes(memory_bytes: int) -> str:
    return f"{memory_bytes // _MEBIBYTE}M"


# -- protocol 3: one server, and a namespace for each container ------------------------------------------------------------


def create_server(uuid: str, *, multiuser: bool) -> Command:
    owner = ("--uid=0",) if multiuser else ()  # in multi-user mode the server must be root's
    return Command(words=("server", "create", SERVER, *owner, f"--allowed-devices={uuid}"))


def list_namespaces() -> Command:
    return Command(words=("namespace", "list", f"--server={SERVER}", _PLAIN))


def parse_namespaces(answer: str) -> Mapping[str, tuple[str, str]]:
    """name -> (memory limit, percentage), as texts ("4G", "30.00"; "-" or the like: none). Raises MpsError."""
    return {name: (memory, cores) for name, _, _, memory, cores, *_ in _rows(answer, 5)}


def within(limits: tuple[str, str], cores: int, memory_bytes: int) -> bool:
    """Whether these limits of memory and cores are at most what was granted."""
    memory, percentage = limits
    try:
        narrow = float(percentage.strip().removesuffix("%")) <= cores  # drivers print "30", "30.0" or "30.00"
    except ValueError:
        return False
    size = _SIZE.fullmatch(memory.strip())
    return narrow and size is not None and int(float(size[1]) * _UNITS[size[2]]) <= memory_bytes


def create_namespace(name: str) -> Command:
    """Raises MpsError for a name that MPS does not accept."""
    if not _NAME.match(name):
        raise MpsError(f"{name!r} can't be the name of an MPS namespace: lower-case letters, digits and '_', 64 at most")
    return Command(words=("namespace", "create", name, f"--server={SERVER}"))


def limit_namespace(name: str, cores: int, memory_bytes: int) -> Command:
    limits = f"--active-thread-percentage={cores}", f"--pinned-memory-limit={_megabytes(memory_bytes)}"
    return Command(words=("namespace", "set", name, f"--server={SERVER}", *limits))


def delete_namespace(name: str) -> Command:
    return Command(words=("namespace", "delete", name, f"--server={SERVER}", "--force"))


# -- answers ---------------------------------------------------------------------------------------------------------------


def refusal_in(command: Command, output: str) -> str | None:
    """The sentence by which the program refuses a command of protocol 2; None if it does not."""
    found = _REFUSAL.search(output) if command.text else None
    return found[0] if found else None


def parse_pids(answer: str) -> tuple[int, ...]:
    """One pid a line. Raises MpsError."""
    return tuple(dict.fromkeys(_number(line, answer) for line in answer.split()))


def _rows(answer: str, width: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
    if any(len(row) < width for row in rows):
        raise _unreadable(f"lines of {width} or more columns", answer)
    return rows


def _number(text: str, answer: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise _unreadable("process ids", answer)
    return int(text)


def _unreadable(wanted: str, answer: str) -> MpsError:
    shown = answer.strip()[:80]
    return MpsError(f"NVIDIA's MPS control program answered {shown!r}, not {wanted}; gpumgr may not support its version")
