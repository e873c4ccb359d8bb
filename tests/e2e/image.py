"""A busybox image, made without Docker: a tar file as `docker save` writes it."""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from pathlib import Path

BUSYBOX = Path("/bin/busybox")
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))


def _layer() -> bytes:
    """Root file system: busybox-static, a link for each of its applets, and the folders that runc mounts on."""
    applets = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("bin", "dev", "etc", "proc", "sys", "tmp"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        _add(tar, "bin/busybox", BUSYBOX.read_bytes(), 0o755)
        for applet in applets:
            if applet != "busybox":
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
    return buffer.getvalue()


def write_image(out: Path, name: str, command: list[str]) -> None:
    """Writes the image `name` to `out`; `command` is what it runs when a container names nothing else."""
    layer = _layer()
    config = {
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": {"Cmd": command, "Env": [PATH]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    with tarfile.open(out, "w") as tar:
        _add(tar, "layer.tar", layer)
        _add(tar, "config.json", json.dumps(config).encode())
        listed = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
        _add(tar, "manifest.json", json.dumps(listed).encode())
