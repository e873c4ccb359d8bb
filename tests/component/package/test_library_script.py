"""The init container's script of config/image/hami-core, run as a process on folders of its own: done, failed, or killed."""

import hashlib
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from gpumgr.common.files import FileIdentity
from gpumgr.enforcement.operator_library import check
from gpumgr.settings import Settings
from gpumgr.settings.profile import hami_core_library
from gpumgr.settings.schema import CheckpointSettings
from tests.libvgpu import build
from tools import PROJECT

LIBRARY: Final = "libvgpu.so"
#: HAMi-core's own library, where the lab has one.
LAB: Final = os.environ.get("GPUMGR_LAB")
VERSION: Final = "5091a2fbe1816df1265490f771346730f29e2c8d"
Done = subprocess.CompletedProcess[str]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Image:
    """The files of the image in a folder."""

    def __init__(self, folder: Path, source: Path, version: str = VERSION) -> None:
        self.folder = folder
        folder.mkdir()
        shutil.copyfile(PROJECT / "config" / "image" / "hami-core" / "install.sh", folder / "install.sh")
        shutil.copyfile(source, folder / LIBRARY)
        (folder / LIBRARY).chmod(0o755)
        self.sha256 = digest(folder / LIBRARY)
        (folder / f"{LIBRARY}.sha256").write_text(f"{self.sha256}  {LIBRARY}\n")
        (folder / "version").write_text(f"{version}\n")

    def command(self, node: Path) -> list[str | Path]:
        return ["/bin/sh", self.folder / "install.sh", node]

    def run(self, node: Path, *, before: Sequence[str | Path] = ()) -> Done:
        return subprocess.run([*before, *self.command(node)], capture_output=True, text=True, check=False)

    def install(self, node: Path) -> str:
        """What it printed."""
        done = self.run(node)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def refusal(self, node: Path, *, before: Sequence[str | Path] = ()) -> str:
        done = self.run(node, before=before)
        assert done.returncode == 1
        return done.stderr

    def replacing(self, name: str, script: str, folder: Path) -> list[str]:
        """A prefix of the command with which the program `name` is `script`."""
        folder.mkdir()
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
        return ["env", f"PATH={folder}:{os.environ['PATH']}"]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two shared libraries; the first is HAMi-core's, where the lab is."""
    folder = tmp_path_factory.mktemp("built")
    for number in (1, 2):
        build(folder / f"{number}.so", f"-Wl,-soname,libvgpu.so.{number}")
    if LAB is not None:
        shutil.copyfile(Path(LAB) / "bin" / "libvgpu-5091a2f-cu13.so", folder / "1.so")
    return folder / "1.so", folder / "2.so"


@pytest.fixture
def image(libraries: tuple[Path, Path], tmp_path: Path) -> Image:
    return Image(tmp_path / "image", libraries[0])


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return tmp_path / "node" / "lib"


def selected(node: Path) -> str:
    """The SHA-256 of the library that the agent would use; it is checked as the agent does."""
    path, sha256 = hami_core_library(Settings(checkpoint=CheckpointSettings(dir=node.parent)))
    assert path is not None
    return check(path, sha256).sha256


def names(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


def identities(node: Path) -> tuple[FileIdentity, FileIdentity]:
    """The identities of the library and of the link."""
    return FileIdentity.of((node / LIBRARY).stat()), FileIdentity.of((node / LIBRARY).lstat())


def complete(*images: Image) -> set[str]:
    return {LIBRARY} | {f"{each.sha256}{name}" for each in images for name in ("", f"/{LIBRARY}", "/version")}


def test_the_agent_finds_what_was_installed_and_done_again_nothing_changes(image: Image, node: Path) -> None:
    mask = os.umask(0o077)
    try:
        assert image.install(node) == f"installed {LIBRARY} {VERSION}, SHA-256 {image.sha256}\n"
    finally:
        os.umask(mask)
    assert (selected(node), names(node)) == (image.sha256, complete(image))
    assert stat.S_IMODE((node / LIBRARY).stat().st_mode) == stat.S_IMODE((node / image.sha256).stat().st_mode) == 0o755
    assert (node / image.sha256 / "version").read_text() == f"{VERSION}\n"
    before = identities(node)
    assert image.install(node) == f"unchanged {LIBRARY} {VERSION}, SHA-256 {image.sha256}\n"
    assert identities(node) == before


def test_an_upgrade_and_the_way_back_keep_the_copies_that_containers_have_mounted(
    image: Image, libraries: tuple[Path, Path], node: Path, tmp_path: Path
) -> None:
    image.install(node)
    mounted = FileIdentity.at(node / image.sha256 / LIBRARY)
    newer = Image(tmp_path / "newer", libraries[1], "newer")
    newer.install(node)
    assert selected(node) == newer.sha256
    # A newer file on the node is no reason to keep it: the image that was rolled out decides.
    image.install(node)
    assert selected(node) == image.sha256
    assert FileIdentity.at(node / image.sha256 / LIBRARY) == mounted
    assert names(node) == complete(image, newer)


def test_another_version_of_the_same_library_is_recorded(image: Image, node: Path) -> None:
    image.install(node)
    (image.folder / "version").write_text("v2\n")
    image.install(node)
    assert (node / image.sha256 / "version").read_text() == "v2\n"


def test_a_damaged_copy_is_replaced_and_not_written_to(image: Image, node: Path) -> None:
    image.install(node)
    target = node / image.sha256 / LIBRARY
    with target.open("rb") as mapped:
        target.chmod(0o600)
        image.install(node)
        with target.open("ab") as file:
            file.write(b"x")
        image.install(node)
        assert hashlib.file_digest(mapped, "sha256").hexdigest() == image.sha256  # the first file, which a container may map
    assert selected(node) == image.sha256
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_an_image_with_another_library_than_its_label_states_installs_nothing(image: Image, node: Path) -> None:
    with (image.folder / LIBRARY).open("ab") as file:
        file.write(b"x")
    assert f"does not have the SHA-256 beside it, {image.sha256}: pull or build the image again" in image.refusal(node)
    assert not node.exists()


@pytest.mark.parametrize(
    ("cp", "status", "said"),
    [
        ('/bin/cp "$@"; echo x >> "$2"', 1, "after the copy"),
        ('head -c 1000 "$1" > "$2"; kill -9 $PPID', -signal.SIGKILL, ""),
        ('echo "cp: No space left on device" >&2; exit 1', 1, "can't be written: make room in the node's folder"),
    ],
    ids=["not what was read", "killed", "full disk"],
)
def test_a_copy_that_fails_leaves_what_was_selected_and_is_begun_again(
    cp: str, status: int, said: str, image: Image, libraries: tuple[Path, Path], node: Path, tmp_path: Path
) -> None:
    old = Image(tmp_path / "old", libraries[1])
    old.install(node)
    done = image.run(node, before=image.replacing("cp", cp, tmp_path / "bin"))
    assert (done.returncode, said in done.stderr) == (status, True)
    assert "No space" not in cp or "No space left on device" in done.stderr
    assert selected(node) == old.sha256
    assert not (node / image.sha256 / LIBRARY).exists()
    assert status != -signal.SIGKILL or (node / image.sha256 / f".{LIBRARY}.new").exists()
    image.install(node)
    assert (selected(node), names(node)) == (image.sha256, complete(old, image))


def test_a_folder_that_cannot_be_written(image: Image, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "can't be made: mount the node's folder there, writable" in image.refusal(tmp_path / "file" / "lib")
    node = tmp_path / "read-only"
    node.mkdir()
    refused = image.replacing("mkdir", f'case "$*" in *{image.sha256}) exit 1; esac; exec /bin/mkdir "$@"', tmp_path / "bin")
    assert "can't be written: mount the node's folder there, writable" in image.refusal(node, before=refused)
    assert names(node) == set()


def test_a_file_of_the_operators_is_not_replaced(image: Image, node: Path) -> None:
    node.mkdir(parents=True)
    (node / LIBRARY).write_text("mine")
    assert "is not a link of gpumgr: move it away" in image.refusal(node)
    assert ((node / LIBRARY).read_text(), names(node)) == ("mine", {LIBRARY})


def test_a_link_that_leads_elsewhere_is_replaced(image: Image, node: Path, tmp_path: Path) -> None:
    node.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (node / LIBRARY).symlink_to(tmp_path / "elsewhere")
    image.install(node)
    assert selected(node) == image.sha256
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_many_runs_at_once(image: Image, libraries: tuple[Path, Path], node: Path, tmp_path: Path) -> None:
    """Scripts of two libraries run together."""
    other = Image(tmp_path / "other", libraries[1])
    commands = [each.command(node) for each in (image, other) for _ in range(4)]
    running = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    ended = [(each.communicate()[1], each.returncode) for each in running]
    assert ended == [("", 0)] * len(commands)
    assert selected(node) in {image.sha256, other.sha256}
    assert names(node) == complete(image, other)


def test_one_argument(image: Image) -> None:
    done = subprocess.run(image.command(Path("a"))[:-1], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "install.sh: usage: install.sh FOLDER\n")
