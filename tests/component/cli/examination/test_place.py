"""What the agent writes: its folders, also the host's in a pod, and its checkpoint, as a look before its start finds them."""

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpumgr.cli.examination import CheckResult, ok, skipped
from gpumgr.cli.examination.folders import look_at_checkpoint, look_at_folders, look_at_host_paths, look_at_settings
from gpumgr.kubelet.other_plugins import lock_node
from gpumgr.ledger.store import NAME, SqliteCheckpoint, read_checkpoint

from .test_command import doctor, write_settings


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def made(folder: Path) -> Path:
    """The folder of a checkpoint that an agent made and closed."""
    assert await SqliteCheckpoint.open(folder).close()
    return folder


async def look(folder: Path) -> CheckResult:
    """What is found of the checkpoint; nothing of it changes."""
    before = content(folder)
    found = look_at_checkpoint(folder)
    assert content(folder) == before
    return found


async def test_a_checkpoint_that_can_be_used_or_made_is_well(folder: Path) -> None:
    assert await look(folder) == ok(f"there is no checkpoint at {folder}/{NAME}: the agent creates one")
    assert await look(await made(folder)) == ok(f"0 allocations in {folder}")


async def test_what_the_agent_sets_aside_by_itself_is_a_warning(folder: Path) -> None:
    (folder / NAME).write_bytes(b"no database" * 100)
    found = await look(folder)
    remedy = (
        "nothing to do: the agent sets the file aside and rebuilds the ledger from the kubelet; if this repeats, check the disk"
    )
    assert (found.state, found.remedy) == ("warning", remedy)


async def test_one_that_an_agent_uses_is_read_beside_it(folder: Path) -> None:
    store = SqliteCheckpoint.open(folder)
    assert look_at_checkpoint(folder).state == "ok"
    await store.save_note("key", "it goes on writing")
    assert await store.close()


async def test_one_that_a_killed_agent_left_keeps_what_is_in_its_log(folder: Path, tmp_path: Path) -> None:
    store = SqliteCheckpoint.open(tmp_path)
    await store.save_note("key", "in the log alone")
    shutil.copytree(tmp_path, folder, dirs_exist_ok=True)
    assert await store.close()
    assert set(content(folder)) == {NAME, f"{NAME}-wal", f"{NAME}-shm"}
    assert look_at_checkpoint(folder).state == "ok"
    assert read_checkpoint(folder).notes == {"key": "in the log alone"}


async def test_folders_that_exist_or_can_be_created_are_ok_and_unchanged(folder: Path) -> None:
    folders = {"checkpoint.dir": folder, "container.allocation_dir": folder / "vm/deep"}
    assert look_at_folders(folders) == ok("2 folders can be written")
    assert os.listdir(folder) == []


async def test_each_folder_that_can_not_be_made_is_named_with_its_setting(folder: Path) -> None:
    (folder / "file").touch()
    some = {"checkpoint.dir": Path("/proc/gpumgr/state"), "container.allocation_dir": folder / "file"}
    found = look_at_folders({**some, "enforcement.run_dir": folder})
    assert found.state == "error"
    assert found.message.startswith("can't be written: /proc/gpumgr/state (checkpoint.dir): it can't be made in /proc: ")
    assert f"{folder}/file (container.allocation_dir): Not a directory" in found.message
    assert "enforcement.run_dir" not in found.message


@pytest.fixture
def closed_folder(folder: Path) -> Iterator[Path]:
    """A folder that only root may write, while this process is not root until the test ends."""
    user = os.geteuid()
    folder.chmod(0o555)
    if user == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    folder.chmod(0o755)


async def test_a_folder_of_another_user_is_reported(closed_folder: Path) -> None:
    found = look_at_folders({"checkpoint.dir": closed_folder / "state"})
    place = f"{closed_folder}/state (checkpoint.dir): it can't be made in {closed_folder}"
    assert found.message == f"can't be written: {place}: Permission denied"


def test_the_command_reports_every_fault_before_the_agent_starts(folder: Path) -> None:
    asyncio.run(made(folder))
    with closing(sqlite3.connect(folder / NAME)) as connection, connection:
        connection.execute("UPDATE schema SET version = 999")
    settings = write_settings(folder, container={"allocation_dir": "/proc/vm"})
    with lock_node(folder / "agent.lock"):
        result = doctor("--config", settings, "--sim", "pcie-a10-4", "--before-start")
    assert result.exit_code == 1
    said = {line.split()[1]: " ".join(line.split()) for line in result.stdout.splitlines()}
    for check, message in {
        "agent": "another gpumgr runs on this node (pid ",
        "checkpoint": f"the checkpoint {folder}/{NAME} was written by a newer gpumgr",
        "folders": "can't be written: /proc/vm (container.allocation_dir): ",
    }.items():
        assert said[check].startswith(f"error {check} {message}")


async def test_a_file_with_settings_that_no_command_reads_is_a_warning(folder: Path) -> None:
    file = folder / "default"
    assert look_at_settings(file).state == "ok"
    file.touch()
    found = look_at_settings(file)
    assert (found.state, str(file) in found.message, "/etc/gpumgr/gpumgr.yaml" in (found.remedy or "")) == ("warning", True, True)


# -- in a pod, by /proc/self/mountinfo ---------------------------------------------------------------------------------------

FOLDERS = {"checkpoint.dir": Path("/var/lib/gpumgr"), "enforcement.run_dir": Path("/run/gpumgr")}
OVERLAY = "641 540 0:53 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/a:/b"
LEDGER = "660 641 8:1 /var/lib/gpumgr /var/lib/gpumgr rw - ext4 /dev/sda1 rw"
RUN = "661 641 0:24 /gpumgr /run/gpumgr rw shared:5 - tmpfs tmpfs rw"
EMPTY = "662 641 8:1 /var/lib/kubelet/pods/4d/volumes/kubernetes.io~empty-dir/state /var/lib/gpumgr rw - ext4 /dev/sda1 rw"


def judged(proc: Path, *lines: str, in_pod: bool = True) -> CheckResult:
    (proc / "self").mkdir(exist_ok=True)
    (proc / "self/mountinfo").write_text("\n".join(lines))
    return look_at_host_paths(FOLDERS, proc, in_pod=in_pod)


def test_all_are_mounted_or_lie_in_what_is_mounted(folder: Path) -> None:
    assert judged(folder, OVERLAY, LEDGER, RUN) == ok("2 folders are mounted from the host")
    assert judged(folder, OVERLAY, "660 641 8:1 /var /var rw - ext4 /dev/sda1 rw", RUN).state == "ok"
    assert judged(folder, in_pod=False) == skipped("not in a pod")


@pytest.mark.parametrize("lines", [(OVERLAY, RUN), (OVERLAY, EMPTY, RUN), (OVERLAY, LEDGER, EMPTY, RUN), (RUN,)])
def test_what_is_the_containers_or_the_pods_own_is_named(lines: tuple[str, ...], folder: Path) -> None:
    found = judged(folder, *lines)
    message = "not mounted from the host: /var/lib/gpumgr (checkpoint.dir); "
    assert (found.state, found.message.startswith(message), "hostPath" in str(found.remedy)) == ("error", True, True)
