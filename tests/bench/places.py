"""Where containers are: cgroups and a /proc in a folder, and the list that the runtime (runtime.py) answers from.

The processes are real, and what the agent reads of them is the kernel's: their entries here are links into the true /proc, all but
`cgroup`, which says what it would say inside the kubelet's tree. So no privilege is needed.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

from gpumgr.ledger.node_use import Container
from gpumgr.placement.pods import PodKey
from gpumgr.runtime.cgroups import Cgroups
from tests.bench.children import child


class Places:
    """What was laid out in `folder`, which should be on a tmpfs, as cgroups and /proc are in memory, too."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.socket = folder / "cri.sock"
        self._cgroup_root, self._list = folder / "cgroup", folder / "containers.json"
        self._listed: list[Container] = []
        self._count = 0

    @classmethod
    def lay_out(cls, folder: Path) -> Self:
        made = cls(folder)
        for each in (made._cgroup_root, made.proc):
            each.mkdir(parents=True)
        (made.proc / "mounts").write_text(f"cgroup2 {made._cgroup_root} cgroup2 rw 0 0\n")
        made.publish()
        return made

    def cgroups(self) -> Cgroups:
        return Cgroups(self._cgroup_root, self.proc)

    def put(self, pod: PodKey, uid: str, name: str, pids: Sequence[int] = ()) -> Container:
        """A container that runs with these processes."""
        number, self._count = self._count, self._count + 1
        container_id = f"{number:064x}"
        cgroup = f"/kubepods/burstable/pod{uid}/{container_id}"
        (self._cgroup_root / cgroup.lstrip("/")).mkdir(parents=True)
        for pid in pids:
            mine = self.proc / str(pid)
            shutil.rmtree(mine, ignore_errors=True)  # the number's former owner
            mine.mkdir()
            (mine / "cgroup").write_text(f"0::{cgroup}\n")
            for file in ("stat", "status"):
                (mine / file).symlink_to(f"/proc/{pid}/{file}")
        (self._cgroup_root / cgroup.lstrip("/") / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        container = Container(
            id=container_id,
            pod=pod,
            pod_uid=uid,
            name=name,
            pid=pids[0] if pids else None,
            cgroup=cgroup,
            created_at=1.0 + number,
        )
        self._listed.append(container)
        return container

    def clear(self) -> None:
        """The runtime lists nothing."""
        self._listed.clear()
        self.publish()

    def publish(self) -> None:
        """From now on the runtime lists what was put."""
        beside = self._list.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(self._listed))
        os.replace(beside, self._list)

    @contextmanager
    def runtime(self) -> Iterator[None]:
        """The runtime answers at `socket`."""
        with child("tests.bench.runtime", self.socket, self._list):
            yield
