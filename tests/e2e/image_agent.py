"""The agent's image: buildah builds config/image/Dockerfile in the tree of the source archive, on a Debian root that mmdebstrap makes.

`python -m tests.e2e.image_agent OUT.tar` writes it as `docker save` does. buildah's layers stay in the cache: a changed line of Python
costs an installed wheel and one layer.
"""

import functools
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import IO, Any, Final

import gpumgr

from .build import alone_in
from .places import PROJECT, cache

NAME: Final = "gpumgr.invalid/gpumgr:e2e"
DOCKERFILE: Final = Path("config/image/Dockerfile")
#: The certificate authorities of this machine, which a RUN needs in a network with authorities of its own.
AUTHORITIES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
SUITE: Final = "bookworm"
#: Debian's own list of what a slim image leaves out.
_SLIM: Final = ("doc/*", "groff/*", "info/*", "linda/*", "lintian/*", "locale/*", "man/*")
_MIRROR: Final = "http://deb.debian.org"
_BASE: Final = "FROM scratch\nADD root.tar /\nENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"


@functools.cache
def build_image() -> Path:
    """The image as `docker save` writes it, in the cache; builds what is missing there. Needs root."""
    folder = cache() / "image"
    with alone_in(folder):
        builder = Builder(folder)
        tree = builder.source_tree()
        inputs = (
            DOCKERFILE,
            Path("config/image/requirements.lock"),
            *(path.relative_to(tree) for path in tree.glob("dist/*.whl")),
        )
        out = folder / f"{hashlib.sha256(b''.join((tree / path).read_bytes() for path in inputs)).hexdigest()[:16]}.tar"
        if not out.exists():
            for old in folder.glob("*.tar"):
                old.unlink()
            builder.build(NAME, tree, "--layers")
            builder.save(NAME, out)
    return out


def build_again(out: Path) -> Path:
    """The same without the cached layers, into the file `out`."""
    folder = cache() / "image"
    with alone_in(folder):
        builder = Builder(folder)
        builder.build("gpumgr:again", builder.source_tree(), "--no-cache")
        builder.save("gpumgr:again", out)
    return out


class Builder:
    """buildah with its images in a folder, and no daemon. RUN is a chroot: it needs neither cgroups nor a network of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _run(self, *arguments: str | Path) -> str:
        # What it mounts ends with it.
        places = [f"--root={self._folder / 'images'}", f"--runroot={self._folder / 'run'}", "--storage-driver=overlay"]
        return _output(["unshare", "--mount", "buildah", *places, *arguments])

    def source_tree(self) -> Path:
        """The source archive unpacked, and in it the wheel, as the Dockerfile's first lines say."""
        source = self._folder / "source"
        shutil.rmtree(source, ignore_errors=True)
        _output([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", source], PROJECT)
        (archive,) = source.iterdir()
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
        archive.unlink()
        (tree,) = source.iterdir()
        _output([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], tree)
        return tree

    def build(self, name: str, tree: Path, *flags: str) -> None:
        """`docker build -t NAME` in this tree."""
        version = f"--build-arg=VERSION={gpumgr.__version__}"
        self.build_any(name, tree / DOCKERFILE, tree, version, *flags)

    def build_any(self, name: str, dockerfile: Path, context: Path, *flags: str) -> None:
        """The same of any Dockerfile. Its base is made first if it is missing: no registry of images is used."""
        usual = ["build", "--isolation=chroot", "--format=docker", "--pull-never"]
        found = re.search(r"^ARG BASE=(\S+)", dockerfile.read_text(), re.MULTILINE)
        assert found is not None
        if f"{found[1]}\n" not in self._run("images", "--format={{.Name}}:{{.Tag}}"):
            self._run(*usual, f"--tag={found[1]}", _debian(self._folder / "base"))
        self._run(*usual, f"--tag={name}", f"--file={dockerfile}", *flags, *self._trust(), context)

    def run(self, name: str, command: list[str], *volumes: str) -> str:
        """What the command prints in a container of the image with these volumes. Raises RuntimeError if it fails."""
        container = self._run("from", "--pull-never", name).strip()
        try:
            mounts = [f"--volume={each}" for each in volumes]
            return self._run("run", "--isolation=chroot", *mounts, container, "--", *command)
        finally:
            self._run("rm", container)

    def _trust(self) -> list[str]:
        """pip trusts the authorities of this machine. The mount hides the image's own folder, so that nothing of it is in a layer."""
        home = self._folder / "home"
        if not AUTHORITIES.exists():
            return []
        config = home / ".config" / "pip" / "pip.conf"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text("[global]\ncert = /root/authorities.crt\n")
        shutil.copyfile(AUTHORITIES, home / "authorities.crt")
        return [f"--volume={home}:/root:ro"]

    def save(self, name: str, out: Path) -> None:
        """As `docker save` does."""
        fresh = out.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        self._run("push", "--quiet", name, f"docker-archive:{fresh}:{name}")
        fresh.rename(out)


def read_archive(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    """What a container of the image starts with, and the image's layers, each a tar archive, the lowest first."""
    with tarfile.open(path) as archive:

        def member(name: str) -> IO[bytes]:
            found = archive.extractfile(name)
            assert found is not None, name
            return found

        (listed,) = json.load(member("manifest.json"))
        return json.load(member(listed["Config"]))["config"], [member(name).read() for name in listed["Layers"]]


def healthcheck_command() -> list[str]:
    """The command with which Docker checks a container's health."""
    config, _ = read_archive(build_image())
    assert config["Healthcheck"]["Test"][0] == "CMD"
    return [str(word) for word in config["Healthcheck"]["Test"][1:]]


def _debian(folder: Path) -> Path:
    """The slim root of a Debian release, as its image has it, and a Dockerfile that makes it an image."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "Dockerfile").write_text(_BASE)
    options = [f"--dpkgopt=path-exclude=/usr/share/{each}" for each in _SLIM]
    options += ["--dpkgopt=path-include=/usr/share/doc/*/copyright", "--skip=output/dev", "--include=usr-is-merged"]
    options += ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", "--mode=root", "--variant=minbase", "--quiet"]
    archives = [f"debian {SUITE}", f"debian {SUITE}-updates", f"debian-security {SUITE}-security"]
    _output(["mmdebstrap", *options, SUITE, folder / "root.tar", *(f"deb {_MIRROR}/{each} main" for each in archives)])
    return folder


def _output(command: list[str | Path], cwd: Path | None = None) -> str:
    """Runs a command; its messages are shown only if it fails."""
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    shutil.copyfile(build_image(), sys.argv[1])
