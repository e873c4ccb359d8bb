"""A settings file that is rewritten, replaced, relinked, broken and mended under whoever follows it."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from gpumgr.agent.history import History
from gpumgr.app.reload import Reloading, Source
from gpumgr.settings import Settings, load_settings
from tests.component.stage.stage import MemoryCheckpoint


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


class Followed:
    """`applied` has what was put in force, one after the other; `reads` counts how often the file was read."""

    def __init__(self, path: Path) -> None:
        self.path, self.reads = path, 0
        self.applied: list[Settings] = []
        self.history = History(MemoryCheckpoint(), wall_clock=lambda: 7.0)
        self.source = Source(path=path, load=self._load)
        self.start = self._load()

    def _load(self) -> Settings:
        self.reads += 1
        return load_settings(self.path, environ={}, overrides={"node.name": "n"})

    @property
    def told(self) -> list[tuple[str | None, str]]:
        return [(entry.code, entry.why) for entry in self.history.entries() if entry.what == "config"]

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not reached():  # noqa: ASYNC110 (what is waited for is another's, and has no event)
                await asyncio.sleep(0.005)

    async def until_read(self, times: int) -> None:
        await self.until(lambda: self.reads >= times)


@asynccontextmanager
async def following(path: Path, *, meanwhile: str | None = None) -> AsyncIterator[Followed]:
    """`meanwhile` is written into the file when it was read, and nobody follows it yet."""
    it = Followed(path)
    if meanwhile is not None:
        rewrite(path, meanwhile)
    reloading = Reloading(it.source, in_force=it.start, apply=it.applied.append, history=it.history, look_seconds=0.02)
    task = asyncio.create_task(reloading.run())
    try:
        yield it
    finally:
        task.cancel()
        await asyncio.wait([task])


def replace(path: Path, text: str) -> None:
    """As careful editors do."""
    new = path.with_name("new")
    new.write_text(text)
    new.rename(path)


@pytest.mark.parametrize("change", [rewrite, replace])
async def test_a_changed_file_is_applied_once(change: Callable[[Path, str], None], tmp_path: Path) -> None:
    path = tmp_path / "gpumgr.yaml"
    path.write_text("{}")
    async with following(path) as it:
        change(path, "placement: {policy: spread}\nhttp: {port: 9000}\n")
        await it.until(lambda: bool(it.told))
        assert [each.placement.policy for each in it.applied] == ["spread"]
        assert it.applied[0].http.port == it.start.http.port
        assert it.told == [("reloaded", "applied: placement.policy; needs a restart of the agent: http.port")]
        await asyncio.sleep(0.1)
        assert it.reads == 2


async def test_a_config_map_that_moves_its_links(tmp_path: Path) -> None:
    """Source: the kubelet's AtomicWriter: FILE -> ..data/FILE, ..data -> ..TIME, which is replaced by a rename."""
    for name, policy in (("..1", "binpack"), ("..2", "spread")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "gpumgr.yaml").write_text(f"placement: {{policy: {policy}}}\n")
    (tmp_path / "..data").symlink_to("..1")
    path = tmp_path / "gpumgr.yaml"
    path.symlink_to("..data/gpumgr.yaml")
    async with following(path) as it:
        (tmp_path / "..data_tmp").symlink_to("..2")
        os.rename(tmp_path / "..data_tmp", tmp_path / "..data")
        await it.until(lambda: bool(it.applied))
        assert it.applied[0].placement.policy == "spread"


@pytest.mark.parametrize("bad", ["placement: {policy: spread, polcy: spread}", "placement: {policy", "placement: [spread]"])
async def test_a_bad_file_changes_nothing_and_says_so(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "gpumgr.yaml"
    path.write_text("{}")
    with structlog.testing.capture_logs() as lines:
        async with following(path) as it:
            path.write_text(bad)
            await it.until(lambda: bool(it.told))
            ((code, why),) = it.told
            assert code == "rejected"
            assert why.startswith(f"the settings of before stay in force: {path}:1: ")
            assert it.applied == []
            path.write_text("{}")
            await it.until(lambda: len(it.told) == 2)
            assert it.told[1] == ("reloaded", "the file says what is in force")
    assert [(line["event"], line["log_level"]) for line in lines] == [("config_rejected", "error"), ("config_reloaded", "info")]
    assert str(path) in lines[0]["reason"]


async def test_a_file_that_goes_away_is_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "gpumgr.yaml"
    path.write_text("placement: {policy: spread}")
    async with following(path) as it:
        path.unlink()
        await it.until(lambda: bool(it.told))
        assert "can't be read" in it.told[0][1]
        path.write_text("placement: {policy: binpack}")
        await it.until(lambda: bool(it.applied))
        assert it.applied[0].placement.policy == "binpack"


async def test_who_asks_has_it_read_at_once_changed_or_not(tmp_path: Path) -> None:
    path = tmp_path / "gpumgr.yaml"
    path.write_text("{}")
    async with following(path) as it:
        for times in (2, 3):
            it.source.ask()
            await it.until_read(times)
        await it.until(lambda: len(it.applied) == 2)
        assert it.told == []


async def test_what_changed_between_the_first_look_and_the_start_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "gpumgr.yaml"
    path.write_text("{}")
    async with following(path, meanwhile="placement: {policy: spread}") as it:
        await it.until(lambda: bool(it.applied))
        assert it.applied[0].placement.policy == "spread"
