"""A busybox image, made without Docker: an OCI image layout in a tar file, which `ctr images import` takes."""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from pathlib import Path
from typing import Any

BUSYBOX = Path("/bin/busybox")
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KIND = "application/vnd.oci.image."


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
    blobs: dict[str, bytes] = {}

    def put(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": _KIND + kind, "digest": f"sha256:{digest}", "size": len(data)}

    layer = put(_layer(), "layer.v1.tar")
    config = {
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": {"Cmd": command, "Env": [PATH]},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        "history": [],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _KIND + "manifest.v1+json",
        "config": put(json.dumps(config).encode(), "config.v1+json"),
        "layers": [layer],
    }
    entry = put(json.dumps(manifest).encode(), "manifest.v1+json") | {
        "platform": {"architecture": ARCHITECTURE, "os": "linux"},
        "annotations": {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name},
    }
    index = {"schemaVersion": 2, "manifests": [entry]}
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index).encode(), **blobs}
    with tarfile.open(out, "w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
