"""The image that buildah makes of the Dockerfile: its size, and that two builds are the same, file by file."""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Final

import pytest

from . import image_agent

MIB: Final = 1 << 20
LARGEST_IMAGE: Final = 120 * MIB
#: The places where a builder mounts its own files.
MOUNTED: Final = {"etc/hosts", "etc/resolv.conf"}
#: A container's start mounts over what is in these.
MOUNTED_OVER: Final = ("dev/", "proc/", "sys/", "run/")
INSTALLED: Final = "var/lib/dpkg/status"

#: Path -> type, mode, owner, group, link's target, content's hash. A hard link is the file that it leads to.
Tree = dict[str, tuple[bytes, int, int, int, str, str]]


def unpacked(layers: Iterable[bytes]) -> Tree:
    """The files of layers that only add to those below."""
    found: Tree = {}
    for layer in layers:
        with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
            for each in tar:
                if each.islnk():
                    found[each.name] = found[each.linkname]
                elif not each.name.startswith(MOUNTED_OVER):
                    digest = hashlib.sha256(content(tar, each).read()).hexdigest() if each.isreg() else ""
                    found[each.name] = (each.type, each.mode, each.uid, each.gid, each.linkname, digest)
    return {name: entry for name, entry in found.items() if name not in MOUNTED}


def content(tar: tarfile.TarFile, file: tarfile.TarInfo) -> IO[bytes]:
    found = tar.extractfile(file)
    assert found is not None, file
    return found


def test_the_image_is_small() -> None:
    _, layers = image_agent.read_archive(image_agent.build_image())
    size = sum(len(gzip.compress(layer, 6)) for layer in layers)
    print({"image_compressed_bytes": size})
    assert size < LARGEST_IMAGE


@pytest.mark.timeout(600, func_only=True)
def test_two_builds_have_the_same_files(tmp_path: Path) -> None:
    """Names, types, modes, owners, links and contents; times are SOURCE_DATE_EPOCH or are absent."""
    config, layers = image_agent.read_archive(image_agent.build_image())
    again, layers_again = image_agent.read_archive(image_agent.build_again(tmp_path / "again.tar"))
    files, files_again = unpacked(layers), unpacked(layers_again)
    if files[INSTALLED] != files_again[INSTALLED]:  # Debian's archive has other packages since the first build
        config, layers = image_agent.read_archive(image_agent.build_again(tmp_path / "third.tar"))
        files = unpacked(layers)
    assert len(files) > 5000
    pairs = {name: (files.get(name), files_again.get(name)) for name in files.keys() | files_again.keys()}
    assert {name: pair for name, pair in pairs.items() if pair[0] != pair[1]} == {}
    assert {**config, "Hostname": ""} == {**again, "Hostname": ""}
