"""Reads the mounted folders of processes as root with few capabilities, under a /proc that may hide processes. To be run by root."""

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from tools import PROJECT

_LOOK = "import sys; from gpumgr.enforcement.container_processes import mounted_names; print(*mounted_names(sys.argv[1:]))"
#: $1: hidepid=, see proc(5); $2: a folder; then the command. The first process of a place of its own can be traced, unlike that of some
#: machines. The tenant is another user, who has the folder mounted in a mount namespace of his own, as a container has.
_PLACE = """
mount -t proc -o "hidepid=$1,gid=65533" proc /proc
mkfifo "$2.ready"
unshare -m sh -c 'mount --bind "$0" /mnt && exec setpriv --reuid=65534 --clear-groups sh -c "echo ready; exec sleep 60"' "$2" >"$2.ready" &
read -r _ <"$2.ready"
rm "$2.ready"
shift 2
"$@"
"""


def look(folder: Path, capabilities: Collection[str], *, hidepid: str = "off") -> "subprocess.CompletedProcess[str]":
    """The result of `mounted_names` for the folder's name, while a tenant has it mounted. `capabilities` without their CAP_: all that the
    look has."""
    rights = ",".join(["-all", *(f"+{each.lower()}" for each in capabilities)])
    lowered = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", f"--bounding-set={rights}"]
    place = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _PLACE, "-", hidepid, str(folder)]
    command = [*place, *lowered, sys.executable, "-c", _LOOK, folder.name]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT, timeout=30)
