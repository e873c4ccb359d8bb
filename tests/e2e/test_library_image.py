"""The image of config/image/hami-core: its labels, and its own command in a container, on a folder of the node.

HAMi-core's source is in no registry, so the stage that compiles it is replaced by a folder with the lab's library (or any other). Where
GPUMGR_HAMI_CORE names a clone of HAMi-core, the whole Dockerfile is built.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from gpumgr.common.files import FileIdentity
from gpumgr.enforcement.operator_library import check
from gpumgr.settings import Settings
from gpumgr.settings.profile import hami_core_library
from gpumgr.settings.schema import CheckpointSettings

from .build import alone_in
from .image_agent import Builder, read_archive
from .places import PROJECT, cache

IMAGE: Final = PROJECT / "config" / "image" / "hami-core"
NAME: Final = "gpumgr.invalid/hami-core:e2e"
LIBRARY: Final = "libvgpu.so"
LAB: Final = os.environ.get("GPUMGR_LAB")
SOURCE: Final = os.environ.get("GPUMGR_HAMI_CORE")


def default_of(argument: str) -> str:
    """What the Dockerfile says; it says the same in both stages."""
    (value,) = set(re.findall(rf"^ARG {argument}=(\S+)$", (IMAGE / "Dockerfile").read_text(), re.MULTILINE))
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Built:
    builder: Builder
    config: dict[str, Any]
    sha256: str

    def install(self, node: Path, options: str = "rw") -> str:
        """The image's own command, as the kubelet runs it."""
        (node / "lib").mkdir(exist_ok=True)
        command = [*self.config["Entrypoint"], *self.config["Cmd"]]
        return self.builder.run(NAME, command, f"{node / 'lib'}:/library:{options}")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    stage = tmp_path_factory.mktemp("stage")
    library = stage / "library" / LIBRARY
    library.parent.mkdir()
    if LAB is not None:
        shutil.copyfile(Path(LAB) / "bin" / "libvgpu-5091a2f-cu13.so", library)
    else:
        subprocess.run(["cc", "-shared", "-x", "c", "-o", library, "/dev/null"], check=True)
    library.chmod(0o755)
    sha256 = hashlib.sha256(library.read_bytes()).hexdigest()
    library.with_name(f"{LIBRARY}.sha256").write_text(f"{sha256}  {LIBRARY}\n")
    library.with_name("version").write_text(f"{default_of('COMMIT')}\n")
    with alone_in(cache() / "image"):
        builder = Builder(cache() / "image")
        flags = [f"--build-context=build={stage}", f"--build-arg=LIBRARY_SHA256={sha256}"]
        builder.build_any(NAME, IMAGE / "Dockerfile", IMAGE, *flags)
        out = stage / "image.tar"
        builder.save(NAME, out)
        yield Built(builder=builder, config=read_archive(out)[0], sha256=sha256)


def test_the_labels_are_those_of_the_library(built: Built) -> None:
    labels = built.config["Labels"]
    assert labels["org.opencontainers.image.version"] == default_of("COMMIT")
    assert labels["io.gpumgr.library.sha256"] == built.sha256
    if LAB is not None:
        assert built.sha256 == default_of("LIBRARY_SHA256")  # what is built by default is what the lab passes


def test_the_container_puts_the_library_in_place_where_the_agent_finds_it(built: Built, tmp_path: Path) -> None:
    assert built.install(tmp_path) == f"installed {LIBRARY} {default_of('COMMIT')}, SHA-256 {built.sha256}\n"
    path, sha256 = hami_core_library(Settings(checkpoint=CheckpointSettings(dir=tmp_path)))
    assert path is not None
    assert check(path, sha256).sha256 == built.sha256
    before = FileIdentity.at(path)
    assert built.install(tmp_path) == f"unchanged {LIBRARY} {default_of('COMMIT')}, SHA-256 {built.sha256}\n"
    assert FileIdentity.at(path) == before


def test_a_folder_that_is_mounted_read_only_fails_with_the_reason(built: Built, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="can't be written: mount the node's folder there, writable"):
        built.install(tmp_path, "ro")
    assert list((tmp_path / "lib").iterdir()) == []


if SOURCE is not None:

    @pytest.mark.timeout(600, func_only=True)
    def test_the_whole_build_yields_the_library_whose_sha256_the_dockerfile_states(built: Built) -> None:
        """A build that yields another one fails."""
        flags = [f"--volume={SOURCE}:/hami-core:ro", "--build-arg=SOURCE=/hami-core"]
        built.builder.build_any("gpumgr.invalid/hami-core:whole", IMAGE / "Dockerfile", IMAGE, *flags)
