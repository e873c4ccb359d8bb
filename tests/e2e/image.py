"""A busybox image, made without Docker: an OCI image layout in a tar file, which `ctr images import` takes."""

import io
import subprocess
import tarfile
from pathlib import Path

from .oci import Layer, write_archive

BUSYBOX = Path("/bin/busybox")
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _folder(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    return info


def _layer() -> bytes:
    """Root file system: busybox-static, a link for each of its applets, and the folders that runc mounts on."""
    applets = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("bin", "dev", "etc", "proc", "sys", "tmp"):
            tar.addfile(_folder(name))
        program = tarfile.TarInfo("bin/busybox")
        data = BUSYBOX.read_bytes()
        program.size, program.mode = len(data), 0o755
        tar.addfile(program, io.BytesIO(data))
        for applet in applets:
            if applet != "busybox":
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
    return buffer.getvalue()


def write_image(out: Path, name: str, command: list[str]) -> None:
    """Writes the image `name` to `out`; `command` is what it runs when a container names nothing else."""
    write_archive(out, name, [Layer.of(_layer())], {"Cmd": command, "Env": [PATH]})
