"""`gpumgr checkpoint show` beside a running agent, after a killed one, and with none."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from gpumgr.common.errors import CheckpointError
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.store import NAME, read_checkpoint

from .conftest import LEDGER, Open, allocation, save_ledger


def files(folder: Path) -> dict[str, bytes]:
    """What the folder holds; -shm is sqlite's shared memory and has no saved data."""
    return {path.name: b"" if path.name.endswith("-shm") else path.read_bytes() for path in folder.iterdir()}


async def test_shows_each_commit_of_a_running_agent(tmp_path: Path, open_checkpoint: Open) -> None:
    checkpoint = open_checkpoint()
    await checkpoint.save(LEDGER.since(Ledger()))
    before = files(tmp_path)
    assert read_checkpoint(tmp_path).ledger == LEDGER
    assert files(tmp_path) == before
    after = LEDGER.occupy(allocation("c"))
    await checkpoint.save(after.since(LEDGER))
    assert read_checkpoint(tmp_path).ledger == after


async def test_shows_what_a_stopped_agent_left(tmp_path: Path, open_checkpoint: Open) -> None:
    checkpoint = open_checkpoint()
    await checkpoint.save(LEDGER.since(Ledger()))
    await checkpoint.save_note("k", "v")
    await checkpoint.close()
    before = files(tmp_path)
    loaded = read_checkpoint(tmp_path)
    assert (loaded.ledger, dict(loaded.notes), loaded.lost) == (LEDGER, {"k": "v"}, False)
    assert files(tmp_path) == before
    assert set(before) == {NAME}


@pytest.mark.parametrize("companions", [("-wal", "-shm"), ("-wal",)])
async def test_shows_what_a_killed_agent_left(companions: tuple[str, ...], tmp_path: Path, open_checkpoint: Open) -> None:
    agent, left = tmp_path / "agent", tmp_path / "left"
    await open_checkpoint(agent).save(LEDGER.since(Ledger()))
    left.mkdir()
    for suffix in ("", *companions):
        (left / (NAME + suffix)).write_bytes((agent / (NAME + suffix)).read_bytes())
    assert read_checkpoint(left).ledger == LEDGER
    assert read_checkpoint(left).ledger == LEDGER


async def test_a_read_during_starts_and_stops_of_an_agent_is_complete(tmp_path: Path, open_checkpoint: Open) -> None:
    await save_ledger(open_checkpoint())
    over = threading.Event()

    def lives() -> None:
        while not over.is_set():
            with closing(sqlite3.connect(tmp_path / NAME)) as agent:
                agent.execute("PRAGMA user_version = " + str(*agent.execute("PRAGMA user_version").fetchone()))

    with ThreadPoolExecutor(1) as pool:
        living = pool.submit(lives)
        try:
            assert {read_checkpoint(tmp_path).ledger == LEDGER for _ in range(300)} == {True}
        finally:
            over.set()
            living.result()


async def test_a_missing_checkpoint_is_lost_and_no_error(tmp_path: Path) -> None:
    loaded = read_checkpoint(tmp_path / "missing")
    assert loaded.lost
    assert loaded.why == f"there is no checkpoint at {tmp_path / 'missing' / NAME}"
    assert read_checkpoint(tmp_path).lost
    (tmp_path / NAME).touch()
    assert read_checkpoint(tmp_path).lost
    assert set(files(tmp_path)) == {NAME}


async def test_a_corrupt_file_is_reported_and_left_in_place(tmp_path: Path, open_checkpoint: Open) -> None:
    await save_ledger(open_checkpoint())
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as connection:
        connection.execute("UPDATE allocations SET sum = 1")
    with pytest.raises(CheckpointError, match="the row of allocation 'id-a' can't be read"):
        read_checkpoint(tmp_path)
    (tmp_path / NAME).write_text("hello")
    with pytest.raises(CheckpointError, match="file is not a database"):
        read_checkpoint(tmp_path)
    assert (tmp_path / NAME).read_text() == "hello"


@pytest.mark.parametrize("without_root", [0o000], indirect=True)
def test_an_inaccessible_folder_is_a_clear_error(without_root: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"can't read the checkpoint {without_root}/{NAME}: Permission denied"):
        read_checkpoint(without_root)
