"""The Dockerfile by a real builder: buildah makes of it what our own builder makes, file by file, from the same Debian root."""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import pytest

import gpumgr

from . import dockerfile, image_agent, oci
from .image_agent import AUTHORITIES, DOCKERFILE
from .manifests import Json
from .places import PROJECT

#: Our builder's Debian as an image, under the name that the Dockerfile has for its base: no registry is asked.
BASE: Final = """FROM scratch
ADD root.tar /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""
#: The places where a builder, and a container's runtime, mount what they make; and a folder that our archive implies by what is in it.
IMPLIED: Final = {"etc/hosts", "etc/resolv.conf", image_agent.AGENT}
#: A container's start mounts over what is in these.
MOUNTED_OVER: Final = ("dev/", "proc/", "sys/", "run/")
INSTALLED: Final = "var/lib/dpkg/status"

#: Path -> type, mode, owner, group, link's target, content's hash. A hard link is the file that it leads to.
Tree = dict[str, tuple[bytes, int, int, int, str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a container of it starts with."""

    files: Tree
    config: Json


class Buildah:
    """buildah with images of its own in a folder, and no daemon. RUN is a chroot: nothing here needs a network or cgroups of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _run(self, *arguments: str | Path) -> None:
        # What it mounts ends with it.
        places = [f"--root={self._folder / 'images'}", f"--runroot={self._folder / 'run'}", "--storage-driver=overlay"]
        command = ["unshare", "--mount", "buildah", *places, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr[-4000:]}"

    def build(self, name: str, context: Path, *flags: str | Path) -> None:
        """What `docker build -t NAME CONTEXT` does, but that the image has one layer."""
        usual = ["--isolation=chroot", "--format=docker", "--pull-never", "--squash"]
        self._run("build", *usual, f"--tag={name}", *flags, context)

    def read(self, name: str) -> Image:
        """The image as `docker save` writes it."""
        saved = self._folder / "saved.tar"
        self._run("push", "--quiet", name, f"docker-archive:{saved}")
        with tarfile.open(saved) as archive:
            (listed,) = json.load(member(archive, "manifest.json"))
            config = json.load(member(archive, listed["Config"]))["config"]
            return Image(files=unpacked([member(archive, name) for name in listed["Layers"]]), config=config)


def read_ours(path: Path) -> Image:
    """The image that our builder made, an OCI archive."""
    with tarfile.open(path) as archive:

        def blob(digest: str) -> IO[bytes]:
            return member(archive, f"blobs/{digest.replace(':', '/')}")

        (listed,) = json.load(member(archive, "index.json"))["manifests"]
        manifest = json.load(blob(listed["digest"]))
        config = json.load(blob(manifest["config"]["digest"]))["config"]
        return Image(files=unpacked([blob(layer["digest"]) for layer in manifest["layers"]]), config=config)


def member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    found = archive.extractfile(name)
    assert found is not None, name
    return found


def unpacked(layers: Iterable[IO[bytes]]) -> Tree:
    """What layers hold that only add to those below."""
    found: Tree = {}
    for layer in layers:
        with tarfile.open(fileobj=layer) as tar:
            for each in tar:
                if each.islnk():
                    found[each.name] = found[each.linkname]
                elif not each.name.startswith(MOUNTED_OVER):
                    digest = hashlib.sha256(member(tar, each.name).read()).hexdigest() if each.isreg() else ""
                    found[each.name] = (each.type, each.mode, each.uid, each.gid, each.linkname, digest)
    return found


@pytest.fixture(scope="module")
def buildah() -> Iterator[Buildah]:
    with tempfile.TemporaryDirectory(prefix="gpumgr-buildah-") as folder:
        yield Buildah(Path(folder))


@pytest.fixture(scope="module")
def built(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image as the Dockerfile's first lines say how to make it, in a tree that is nothing but the source archive."""
    folder = tmp_path_factory.mktemp("build")
    context = source_tree(folder)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], check=True, cwd=context, capture_output=True)
    base = folder / "base"
    base.mkdir()
    (base / "Dockerfile").write_text(BASE)
    (base / "root.tar").write_bytes(oci.root_layer(image_agent.base_root()))
    buildah.build(dockerfile.read_stages(DOCKERFILE, {})[0].base, base)
    written = context / DOCKERFILE.relative_to(PROJECT)
    buildah.build("gpumgr:dev", context, f"--file={written}", f"--build-arg=VERSION={gpumgr.__version__}", *trust(folder))
    return buildah.read("gpumgr:dev")


def source_tree(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder / "sdist")]
    subprocess.run(command, check=True, cwd=PROJECT, capture_output=True)
    (archive,) = (folder / "sdist").iterdir()
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "source", filter="data")
    (made,) = (folder / "source").iterdir()
    return made


def trust(folder: Path) -> list[str]:
    """For a machine in a network with certificate authorities of its own. The mount hides the folder of the image, so that none is left."""
    if not AUTHORITIES.exists():
        return []
    home = folder / "home"
    pip = home / ".config" / "pip" / "pip.conf"
    pip.parent.mkdir(parents=True)
    pip.write_text("[global]\ncert = /root/authorities.crt\n")
    shutil.copyfile(AUTHORITIES, home / "authorities.crt")
    return [f"--volume={home}:/root:ro"]


@pytest.fixture(scope="module")
def ours(built: Image, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image that all other tests run. It is kept; where Debian's archive has other packages by now, it is made again like the other."""
    kept = read_ours(image_agent.build_image())
    if kept.files[INSTALLED] == built.files[INSTALLED]:
        return kept
    folder = tmp_path_factory.mktemp("image")
    root = image_agent.base_root()
    subprocess.run(["cp", "-a", root, folder / root.name], check=True)
    return read_ours(image_agent.build_image(folder))


def test_every_file_is_the_same(built: Image, ours: Image) -> None:
    """Names, types, modes, owners, links and contents; times come from SOURCE_DATE_EPOCH or are absent."""
    names = (built.files.keys() | ours.files.keys()) - IMPLIED
    assert len(names) > 5000
    pairs = {name: (built.files.get(name), ours.files.get(name)) for name in names}
    assert {name: pair for name, pair in pairs.items() if pair[0] != pair[1]} == {}


def test_a_container_starts_the_same(built: Image, ours: Image) -> None:
    def said(config: Mapping[str, Any]) -> Json:
        labels = {name: text for name, text in config["Labels"].items() if name != "io.buildah.version"}
        same = {name: config[name] for name in ("Entrypoint", "Cmd", "ExposedPorts")}
        return same | {"Env": sorted(config["Env"]), "Labels": labels, "Healthcheck": config["Healthcheck"]["Test"]}

    assert said(built.config) == said(ours.config)
