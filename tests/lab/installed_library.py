"""HAMi-core's libvgpu.so as the init container of config/image/hami-core installs it, without a setting."""

import shutil
import subprocess
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from pathlib import Path

from tools import PROJECT

from .hami_core import WRONG
from .node import GIB, LIMIT_BYTES, LabNode, Tenant, lab_node
from .scenario import Skip, Trial, scenario

_LIBRARY = "libvgpu.so"


def install(node: LabNode, library: Path) -> str:
    """As the image does it; the library's SHA-256."""
    image = node.folder / f"image-{library.stem}"
    image.mkdir()
    shutil.copy(PROJECT / "config" / "image" / "hami-core" / "install.sh", image)
    shutil.copy(library, image / _LIBRARY)
    digest = sha256(library.read_bytes()).hexdigest()
    (image / f"{_LIBRARY}.sha256").write_text(f"{digest}  {_LIBRARY}\n")
    (image / "version").write_text(f"{library.stem}\n")
    subprocess.run(["/bin/sh", image / "install.sh", node.folder / "checkpoint" / "lib"], check=True, stdout=subprocess.DEVNULL)
    return digest


async def limited(tenant: Tenant) -> None:
    await tenant.main.init()
    assert await tenant.main.number("info", "total") == LIMIT_BYTES
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2


def library_of(tenant: Tenant) -> Path:
    return tenant.host_path(f"/usr/local/vgpu/{_LIBRARY}")


def unset_node(trial: Trial) -> AbstractAsyncContextManager[LabNode]:
    """The settings name the backend and no library."""
    if trial.binary in WRONG:
        raise Skip("gpumgr must refuse this build")
    return lab_node(trial.run, trial.name, {"enforcement": {"backend": "hami-core"}})


@scenario("hami-core", unset_node)
async def installed(trial: Trial, node: LabNode) -> None:
    """An installed library limits containers without a setting, and an upgrade leaves running containers alone."""
    other = next(path for name, path in trial.run.files.binaries["hami-core"].items() if name not in (trial.binary, *WRONG))
    first = install(node, trial.program)
    await node.restart_agent()
    before = await node.tenant("before")
    await limited(before)
    assert library_of(before).parent.name == first
    second = install(node, other)
    await node.restart_agent()
    after = await node.tenant("after")
    await limited(after)
    assert library_of(after).parent.name == second
    assert sha256(library_of(before).read_bytes()).hexdigest() == first
    assert await before.main.result(f"alloc {6 * GIB}") == 2
    assert await before.main.result(f"alloc {4 * GIB}") == 0
