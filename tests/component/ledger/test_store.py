"""What was saved is there after any restart, and what can't be trusted is never taken for an empty ledger."""

import asyncio
import errno
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import CheckpointError
from gpumgr.common.units import BLOCK_MEBIBYTES
from gpumgr.ledger.history import HISTORY_ENTRIES, Candidate, HistoryEntry
from gpumgr.ledger.ids import RegisteredInstance
from gpumgr.ledger.ledger import Change, Ledger
from gpumgr.ledger.store import NAME, SqliteCheckpoint, read_checkpoint, translate

from .conftest import LEDGER, REGISTRY, Open, allocation

REPOSITORY = Path(__file__).parents[3]
ASIDE = f"{NAME}.corrupt-19700101T000000Z"


async def reopened(open_checkpoint: Open, checkpoint: SqliteCheckpoint) -> SqliteCheckpoint:
    assert await checkpoint.close()
    return open_checkpoint()


async def test_a_first_start_is_lost_and_empty(open_checkpoint: Open) -> None:
    loaded = open_checkpoint().load()
    assert (loaded.ledger, loaded.lost, loaded.set_aside) == (Ledger(), True, None)
    assert loaded.why == "there was no checkpoint yet"


async def test_a_ledger_is_loaded_as_it_was_saved(open_checkpoint: Open) -> None:
    checkpoint = open_checkpoint()
    await checkpoint.save(LEDGER.since(Ledger()))
    await checkpoint.save_note("migrated", "yes")
    await checkpoint.save_note("migrated", "gpu-manager 1.1.5 \N{SNOWMAN}")
    loaded = (await reopened(open_checkpoint, checkpoint)).load()
    assert (loaded.ledger, loaded.notes, loaded.lost) == (LEDGER, {"migrated": "gpu-manager 1.1.5 \N{SNOWMAN}"}, False)
    assert list(loaded.ledger.allocations) == ["id-a", "id-b"]


async def test_changes_add_up(open_checkpoint: Open) -> None:
    after = (
        LEDGER.free(["id-a"])
        .occupy(allocation("b", 0b11100))
        .occupy(allocation("c"))
        .with_gpu_registry(REGISTRY.register("GPU-33333333-cccc", 4 * BLOCK_MEBIBYTES))
    )
    checkpoint = open_checkpoint()
    await checkpoint.save(LEDGER.since(Ledger()))
    await checkpoint.save(after.since(LEDGER))
    await checkpoint.save(Change())
    await checkpoint.save(Change(drop=("nobody",)))
    assert (await reopened(open_checkpoint, checkpoint)).load().ledger == after


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


async def test_only_the_owner_can_read_the_files(tmp_path: Path, open_checkpoint: Open) -> None:
    (tmp_path / NAME).touch(0o644)
    await open_checkpoint().save(LEDGER.since(Ledger()))
    assert modes(tmp_path) == {NAME: 0o600, f"{NAME}-wal": 0o600, f"{NAME}-shm": 0o600}


async def test_a_save_goes_on_when_its_caller_is_cancelled(open_checkpoint: Open) -> None:
    checkpoint = open_checkpoint()
    task = asyncio.create_task(checkpoint.save(LEDGER.since(Ledger())))
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert (await reopened(open_checkpoint, checkpoint)).load().ledger == LEDGER


async def test_a_write_to_a_removed_file_raises(tmp_path: Path, open_checkpoint: Open) -> None:
    """sqlite would still write to it, and the next start would find nothing."""
    checkpoint = open_checkpoint()
    (tmp_path / NAME).unlink()
    with pytest.raises(CheckpointError, match=r"gpumgr\.sqlite3 was removed; start the agent again"):
        await checkpoint.save(LEDGER.since(Ledger()))


async def test_a_folder_that_the_disk_does_not_show_is_no_bug(
    tmp_path: Path, open_checkpoint: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug would end the agent."""
    checkpoint = open_checkpoint()

    def fail(_path: Path) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", fail)
        with pytest.raises(
            CheckpointError, match=rf"can't reach the checkpoint {tmp_path / NAME}: Input/output error; check the"
        ):
            await checkpoint.save(LEDGER.since(Ledger()))
    await checkpoint.save(LEDGER.since(Ledger()))


async def test_a_closed_checkpoint_raises(open_checkpoint: Open) -> None:
    checkpoint = open_checkpoint()
    assert await checkpoint.close()
    assert await checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed"):
        await checkpoint.save_note("a", "b")


SAVER = """
import asyncio, signal, sys
from pathlib import Path
from typing import Any
from gpumgr.ledger.ledger import Change
from gpumgr.ledger.store import SqliteCheckpoint
from tests.component.ledger.conftest import GPU, allocation
from gpumgr.ledger.ids import GpuRegistry

def half(n, side):
    return allocation(f"{n}-{('left', 'right')[side]}", 0, blocks={GPU: 1 << (2 * n + side)})

async def main():
    checkpoint = SqliteCheckpoint.open(Path(sys.argv[1]))
    await checkpoint.save(Change(gpu_registry=GpuRegistry().register("GPU-11111111-aaaa", 256_000_000)))
    start = len(checkpoint.load().ledger.allocations)
    for n in range(start, start + 100):
        await checkpoint.save(Change(put=(half(n, 0), half(n, 1))))
        print(n, flush=True)
    signal.pause()  # a test that stalls would get more allocations than it can compare in a minute

asyncio.run(main())
"""


def save_until_killed(folder: Path, saves: int) -> int:
    """Kills a process that saves, after `saves` of them; how many it said are durable."""
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, str(folder)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        for _ in range(saves):
            assert process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        return saves + len(process.stdout.read().splitlines())


async def test_kill_at_any_moment_keeps_what_was_saved(tmp_path: Path, open_checkpoint: Open) -> None:
    said = sum(save_until_killed(tmp_path, saves) for saves in (1, 7, 25))
    found = open_checkpoint().load().ledger.allocations
    halves = [{name.removesuffix(f"-{side}") for name in found if name.endswith(side)} for side in ("left", "right")]
    assert halves[0] == halves[1]
    # Each process may have committed one change that it had no time to report.
    assert said <= len(halves[0]) <= said + 3


# -- files that can't be trusted -------------------------------------------------------------------------------------------


@pytest.fixture
async def filled(tmp_path: Path, open_checkpoint: Open) -> Path:
    """The file of a checkpoint with LEDGER and a note."""
    checkpoint = open_checkpoint()
    await checkpoint.save(LEDGER.since(Ledger()))
    await checkpoint.save_note("k", "v")
    await checkpoint.close()
    return tmp_path / NAME


def content(path: Path) -> bytes:
    return path.read_bytes()


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


DAMAGES = {
    "a flipped bit in a mask": "UPDATE allocations SET record = replace(record, '\"3\"', '\"2\"')",
    "another id": "UPDATE allocations SET id = 'id-z' WHERE id = 'id-a'",
    "a record of bytes": "UPDATE allocations SET record = x'ff00'",
    "a record that is no UTF-8": "UPDATE allocations SET record = CAST(x'ff00' AS TEXT)",
    "a gpu's size": "UPDATE gpus SET record = replace(record, '\"memory_mebibytes\":', '\"memory_mebibytes\":1')",
    "a gpu's size in words": "UPDATE gpus SET record = 'many'",
    "a note": "UPDATE notes SET value = 'w'",
    "a note of bytes": "UPDATE notes SET value = x'00'",
    "a table that is gone": "DROP TABLE notes",
    "a column that is gone": "ALTER TABLE gpus DROP COLUMN record",
    "no history": "DROP TABLE history",
    "no version": "DELETE FROM schema",
    "two versions": "INSERT INTO schema VALUES (1)",
    "an earlier schema": "UPDATE schema SET version = 6",
    "a version in words": "UPDATE schema SET version = 'one'",
    "somebody else's tables": "DROP TABLE schema",
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_rows_set_the_file_aside(damage: str, filled: Path, tmp_path: Path, open_checkpoint: Open) -> None:
    execute(filled, DAMAGES[damage])
    checkpoint = open_checkpoint()
    loaded = checkpoint.load()
    assert (loaded.lost, loaded.ledger, loaded.set_aside) == (True, Ledger(), tmp_path / ASIDE)
    assert loaded.why
    await checkpoint.save(LEDGER.since(Ledger()))
    assert (await reopened(open_checkpoint, checkpoint)).load().ledger == LEDGER


async def test_the_damaged_row_is_named(filled: Path, open_checkpoint: Open) -> None:
    execute(filled, "UPDATE allocations SET record = '{}' WHERE id = 'id-b'")
    assert open_checkpoint().load().why == "the row of allocation 'id-b' can't be read: its checksum is wrong"


CORDONS = {"cordons": "GPU-1 \N{SNOWMAN}"}


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        ("UPDATE allocations SET record = '{}'", True),
        ("UPDATE notes SET value = 'w' WHERE key = 'k'", True),
        ("UPDATE notes SET value = CAST(x'fffe' AS TEXT) WHERE key = 'k'", True),
        ("DROP TABLE schema", True),
        ("UPDATE notes SET value = 'GPU-2' WHERE key = 'cordons'", False),
        ("UPDATE notes SET key = CAST(x'fffe' AS TEXT) WHERE key = 'cordons'", False),
        ("DROP TABLE notes", False),
    ],
)
async def test_durable_notes_survive_a_corrupt_file_or_are_reported(
    damage: str, kept: bool, filled: Path, tmp_path: Path, open_checkpoint: Open
) -> None:
    checkpoint = open_checkpoint()
    await checkpoint.save_note("cordons", CORDONS["cordons"])
    await checkpoint.close()
    execute(filled, damage)
    before = content(filled)
    checkpoint = open_checkpoint(outlive=("cordons",))
    loaded = checkpoint.load()
    assert (loaded.lost, loaded.ledger, loaded.set_aside) == (True, Ledger(), tmp_path / ASIDE)
    assert (dict(loaded.notes), loaded.notes_lost) == (CORDONS if kept else {}, not kept)
    assert content(tmp_path / ASIDE) == before
    again = (await reopened(open_checkpoint, checkpoint)).load()
    assert (again.lost, again.notes) == (False, loaded.notes)


async def test_where_there_was_no_such_note_none_is_lost(filled: Path, tmp_path: Path, open_checkpoint: Open) -> None:
    execute(filled, "UPDATE allocations SET record = '{}'")
    loaded = open_checkpoint(outlive=("cordons",)).load()
    assert (loaded.set_aside, loaded.notes, loaded.notes_lost) == (tmp_path / ASIDE, {}, False)


async def test_of_a_file_that_is_no_database_notes_may_be_lost(tmp_path: Path, open_checkpoint: Open) -> None:
    (tmp_path / NAME).write_text("hello")
    assert open_checkpoint(outlive=("cordons",)).load().notes_lost


@pytest.mark.peer_bug("B51: it reads any content")
@pytest.mark.parametrize("content", [b"\0", b"hello", b'{"PodGPUMapping":{}}' * 500, b"SQLite format 3\0" + b"\xff" * 4096])
async def test_a_file_that_is_no_database_is_set_aside_whole(content: bytes, tmp_path: Path, open_checkpoint: Open) -> None:
    (tmp_path / NAME).write_bytes(content)
    loaded = open_checkpoint().load()
    assert (loaded.lost, loaded.set_aside) == (True, tmp_path / ASIDE)
    assert loaded.set_aside is not None
    assert loaded.set_aside.read_bytes() == content


async def test_files_set_aside_in_one_second_have_different_names(tmp_path: Path, open_checkpoint: Open) -> None:
    for text in ("one", "two"):
        (tmp_path / NAME).write_text(text)
        assert await open_checkpoint().close()
    assert (tmp_path / ASIDE).read_text() == "one"
    assert (tmp_path / f"{ASIDE}.1").read_text() == "two"


async def test_a_damaged_byte_loads_the_saved_state_or_nothing(filled: Path, tmp_path: Path, open_checkpoint: Open) -> None:
    sound = content(filled)
    for place in [*range(0, 100, 3), *range(100, len(sound), 331)]:
        folder = tmp_path / str(place)
        folder.mkdir()
        damaged = bytearray(sound)
        damaged[place] ^= 0x55
        (folder / NAME).write_bytes(damaged)
        loaded = open_checkpoint(folder).load()
        assert loaded.ledger == (Ledger() if loaded.lost else LEDGER), place


@pytest.mark.parametrize("length", [1, 100, 4095, 4096, 9000, 20_000])
async def test_a_truncated_file_loads_nothing(length: int, filled: Path, tmp_path: Path, open_checkpoint: Open) -> None:
    os.truncate(filled, length)
    loaded = open_checkpoint().load()
    assert (loaded.lost, loaded.set_aside) == (True, tmp_path / ASIDE)


@pytest.mark.peer_bug("B51: its file has no version")
async def test_a_newer_schema_is_left_alone(filled: Path, open_checkpoint: Open) -> None:
    execute(filled, "UPDATE schema SET version = 9")
    before = content(filled)
    with pytest.raises(CheckpointError, match=r"newer gpumgr \(schema 9, this one reads 8 only\): start that version again"):
        open_checkpoint()
    assert content(filled) == before


# -- folders and disks -----------------------------------------------------------------------------------------------------


async def test_a_read_only_folder_is_a_clear_error(without_root: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"can't open the checkpoint {without_root}/{NAME}: Permission denied; make its folder writable"
    ):
        SqliteCheckpoint.open(without_root)


async def test_a_file_in_the_folders_place_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="File exists; make its folder writable"):
        SqliteCheckpoint.open(tmp_path / "file")
    with pytest.raises(CheckpointError, match="Not a directory"):
        SqliteCheckpoint.open(tmp_path / "file" / "folder")


def test_the_error_of_a_full_database_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite3"
    execute(path, "CREATE TABLE t (x)")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA max_page_count=2")
        with pytest.raises(sqlite3.OperationalError) as caught:
            connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    said = str(translate(caught.value, path, "write"))
    assert said.startswith(f"can't write the checkpoint {path}: database or disk is full (SQLITE_FULL); make room")


# -- the history -----------------------------------------------------------------------------------------------------------


def entry(number: int, **facts: Any) -> HistoryEntry:
    return HistoryEntry(number=number, at=float(number), what="granted", pod=("ns", f"p{number}"), gpus=("0fe1c342",), **facts)


async def test_the_history_is_loaded_as_it_was_saved_and_is_bounded(tmp_path: Path, open_checkpoint: Open) -> None:
    checkpoint = open_checkpoint()
    told = entry(1, candidates=(Candidate(gpu="0fe1c342", index=0, cores_free=70, note="XID 79"),), why="\N{SNOWMAN} 'quoted'\n")
    await checkpoint.save(Change(entries=(told,)))
    await checkpoint.close()
    assert read_checkpoint(tmp_path).history == (told,)
    checkpoint = open_checkpoint()
    assert checkpoint.load().history == (told,)
    numbers = [*range(2, 51), *range(2051, 2051 + HISTORY_ENTRIES)]  # a restart leaves a gap
    await checkpoint.save(Change(entries=tuple(entry(number) for number in numbers[:-1])))
    assert len(read_checkpoint(tmp_path).history) == HISTORY_ENTRIES
    await checkpoint.save(Change(entries=(entry(numbers[-1]),)))
    assert [each.number for each in read_checkpoint(tmp_path).history] == numbers[-HISTORY_ENTRIES:]


async def test_grants_of_existing_allocations_stay(tmp_path: Path, open_checkpoint: Open) -> None:
    checkpoint = open_checkpoint()
    await checkpoint.save(replace(LEDGER.since(Ledger()), entries=(entry(1, id="id-a"), entry(2, id="id-b"))))
    refused = replace(entry(3, id="id-a"), what="refused")
    more = tuple(replace(entry(number), what="event") for number in range(4, HISTORY_ENTRIES + 4))
    await checkpoint.save(Change(entries=(refused, *more)))
    assert [each.number for each in read_checkpoint(tmp_path).history[:3]] == [1, 2, 4]
    await checkpoint.save(Change(drop=("id-a",)))
    await checkpoint.save(Change(entries=(replace(entry(HISTORY_ENTRIES + 4), what="freed"),)))
    assert [each.number for each in read_checkpoint(tmp_path).history[:3]] == [2, 5, 6]


async def test_a_note_and_its_entry_are_one_transaction(tmp_path: Path, open_checkpoint: Open) -> None:
    checkpoint = open_checkpoint()
    await checkpoint.save_note("k", "v", (entry(1),))
    unsayable = replace(entry(2), why="\ud800")
    with pytest.raises(UnicodeEncodeError):
        await checkpoint.save_note("k", "w", (unsayable,))
    loaded = read_checkpoint(tmp_path)
    assert (loaded.notes, loaded.history) == ({"k": "v"}, (entry(1),))


@pytest.mark.parametrize("rubbish", ["'rubbish'", "x'fffe'", "CAST(x'fffe' AS TEXT)", "7", "''"])
async def test_a_damaged_entry_does_not_affect_the_ledger(rubbish: str, tmp_path: Path, open_checkpoint: Open) -> None:
    checkpoint = open_checkpoint()
    await checkpoint.save(LEDGER.since(Ledger()))
    await checkpoint.save(Change(entries=(entry(1), entry(2), entry(3))))
    await checkpoint.close()
    execute(tmp_path / NAME, f"UPDATE history SET record = {rubbish} WHERE number = 2")
    loaded = open_checkpoint().load()
    assert (loaded.lost, loaded.unreadable, [each.number for each in loaded.history]) == (False, 1, [1, 3])
    assert loaded.ledger == LEDGER


async def test_mig_devices_are_stored(tmp_path: Path, open_checkpoint: Open) -> None:
    checkpoint = open_checkpoint()
    registry = REGISTRY.register(REGISTRY.gpus[0].uuid, 0, 0, [RegisteredInstance("MIG-a", "1g.10gb", 9728)])
    await checkpoint.save(Change(gpu_registry=registry))
    assert read_checkpoint(tmp_path).ledger.gpu_registry == registry
