"""Writes an image as `ctr images import` and `skopeo` take it: an OCI image layout in a tar file. Same content, same bytes."""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ARCHITECTURE: Final = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_KIND: Final = "application/vnd.oci.image."


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Layer:
    """A compressed tar, and the digest of what it holds."""

    data: bytes
    content: str

    @classmethod
    def of(cls, tar: bytes) -> "Layer":
        return cls(gzip.compress(tar, 9, mtime=0), _digest(tar))

    @classmethod
    def read(cls, data: bytes) -> "Layer":
        """A layer that was kept."""
        return cls(data, _digest(gzip.decompress(data)))


def write_archive(out: Path, name: str, layers: Sequence[Layer], config: Mapping[str, Any], *, created_seconds: int = 0) -> None:
    """Writes image `name` to `out`. The lowest layer comes first; `config` is what a container starts with."""
    blobs: dict[str, bytes] = {}

    def put(data: bytes, kind: str) -> dict[str, Any]:
        blobs[f"blobs/sha256/{_digest(data).removeprefix('sha256:')}"] = data
        return {"mediaType": _KIND + kind, "digest": _digest(data), "size": len(data)}

    image = {
        "created": datetime.fromtimestamp(created_seconds, UTC).isoformat().replace("+00:00", "Z"),
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [layer.content for layer in layers]},
        "history": [],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _KIND + "manifest.v1+json",
        "config": put(json.dumps(image).encode(), "config.v1+json"),
        "layers": [put(layer.data, "layer.v1.tar+gzip") for layer in layers],
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


def compressed_bytes(archive: Path) -> dict[str, int]:
    """Digest -> size of each layer, as a registry would send it."""
    with tarfile.open(archive) as tar:

        def read(name: str) -> Any:
            member = tar.extractfile(name)
            assert member is not None, name
            return json.load(member)

        (entry,) = read("index.json")["manifests"]
        manifest = read("blobs/" + entry["digest"].replace(":", "/"))
        return {layer["digest"]: int(layer["size"]) for layer in manifest["layers"]}


def root_layer(root: Path, *, only: str | None = None, without: str | None = None, time_seconds: int = 0) -> bytes:
    """A folder as a plain tar: sorted, with one time for all, owners by number alone. `only` and `without` name a part of it.

    Left out are /dev, /proc, /sys and /run's contents, which a container's start mounts over. Hard links stay links.
    """
    buffer = io.BytesIO()
    seen: dict[tuple[int, int], str] = {}
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted((root / only).rglob("*") if only else root.rglob("*")):
            name = str(path.relative_to(root))
            top, _, below = name.partition("/")
            if (below and top in ("dev", "proc", "sys", "run")) or (
                without and (name == without or name.startswith(without + "/"))
            ):
                continue
            info = tar.gettarinfo(path, name)
            inode = (path.lstat().st_dev, path.lstat().st_ino)
            # By the order of names, not by the order in which tarfile meets inodes.
            if info.isreg() or info.islnk():
                first = seen.setdefault(inode, name)
                info.type, info.linkname = (tarfile.REGTYPE, "") if first == name else (tarfile.LNKTYPE, first)
                info.size = path.lstat().st_size if first == name else 0
            info.mtime, info.uname, info.gname = time_seconds, "", ""
            if info.isreg():
                with path.open("rb") as content:
                    tar.addfile(info, content)
            else:
                tar.addfile(info)
    return buffer.getvalue()
