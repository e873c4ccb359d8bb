"""A settings file that is rewritten, replaced, relinked, broken and repaired while the agent watches it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import structlog

from gpumgr.settings import Settings, load_settings
from gpumgr.settings.live import SettingsReloader, SettingsSource
from tests.background import background, until


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


def remove(path: Path) -> None:
    path.unlink()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The settings file, which has no settings yet."""
    file = tmp_path / "gpumgr.yaml"
    file.write_text("{}")
    return file


class Watched:
    """`applied` has what was put in force, one after the other; `reads` counts how often the file was read. While `answers` is cleared,
    reading hangs."""

    def __init__(self, path: Path) -> None:
        self.path, self.reads = path, 0
        self.answers = threading.Event()
        self.answers.set()
        self.applied: list[Settings] = []
        self.told: list[tuple[str, str]] = []
        self.source = SettingsSource(path=path, load=self._load)
        self.start = self._load()

    def _load(self) -> Settings:
        self.reads += 1
        self.answers.wait()
        return load_settings(self.path, environ={}, overrides={"node.name": "n"})


@asynccontextmanager
async def following(path: Path, *, meanwhile: str | None = None, read_seconds: float = 30.0) -> AsyncIterator[Watched]:
    """`meanwhile` is written into the file after the first read and before the watch starts."""
    it = Watched(path)
    if meanwhile is not None:
        rewrite(path, meanwhile)
    reloading = SettingsReloader(
        it.source,
        current=it.start,
        apply=it.applied.append,
        record=lambda code, why: it.told.append((code, why)),
        check_seconds=0.02,
        read_seconds=read_seconds,
    )
    async with background(reloading.run()) as task:
        try:
            yield it
            assert not task.done(), task
        finally:
            it.answers.set()


def replace(path: Path, text: str) -> None:
    """Writes a new file and renames it, as many editors do."""
    new = path.with_name("new")
    new.write_text(text)
    new.rename(path)


@pytest.mark.parametrize("change", [rewrite, replace])
async def test_a_changed_file_is_applied_once(change: Callable[[Path, str], object], path: Path) -> None:
    async with following(path) as it:
        change(path, "placement: {policy: spread}\nhttp: {port: 9000}\n")
        await until(lambda: bool(it.told))
        assert [each.placement.policy for each in it.applied] == ["spread"]
        assert it.applied[0].http.port == it.start.http.port
        assert it.told == [("reloaded", "applied: placement.policy; needs a restart of the agent: http.port")]
        await asyncio.sleep(0.1)
        assert it.reads == 2
        change(path, "placement: {policy: spread}\nlog: {level: debug}\n")
        await until(lambda: len(it.told) == 2)
        assert it.told[1] == ("reloaded", "applied: log.level"), "compared with what is in force"


@pytest.mark.parametrize("bad", ["placement: {policy: spread, polcy: spread}", "placement: {policy", "placement: [spread]"])
async def test_a_bad_file_changes_nothing_and_is_reported(bad: str, path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with following(path) as it:
            rewrite(path, bad)
            await until(lambda: bool(it.told))
            ((code, why),) = it.told
            assert code == "rejected"
            assert why.startswith(f"the previous settings stay in effect: {path}:1: ")
            assert it.applied == []
            rewrite(path, "{}")
            await until(lambda: len(it.told) == 2)
            assert it.told[1] == ("reloaded", "the file has the settings that are in effect")
    assert [(line["event"], line["log_level"]) for line in lines] == [("config_rejected", "error"), ("config_reloaded", "info")]
    assert str(path) in lines[0]["reason"]


async def test_a_file_that_goes_away_is_a_bad_file(path: Path) -> None:
    rewrite(path, "placement: {policy: spread}")
    async with following(path) as it:
        remove(path)
        await until(lambda: bool(it.told))
        assert "can't be read" in it.told[0][1]
        rewrite(path, "placement: {policy: binpack}")
        await until(lambda: bool(it.applied))
        assert it.applied[0].placement.policy == "binpack"


async def test_a_reload_request_reads_the_file_at_once_changed_or_not(path: Path) -> None:
    async with following(path) as it:
        for times in (2, 3):
            it.source.ask()
            await until(partial(lambda times: it.reads >= times, times))
        await until(lambda: len(it.applied) == 2)
        assert it.told == []


async def test_a_change_between_the_first_read_and_the_start_is_applied(path: Path) -> None:
    async with following(path, meanwhile="placement: {policy: spread}") as it:
        await until(lambda: bool(it.applied))
        assert it.applied[0].placement.policy == "spread"


async def test_a_file_system_that_hangs_is_reported_once_and_the_file_is_read_when_it_answers(path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with following(path, read_seconds=0.2) as it:
            it.answers.clear()
            rewrite(path, "placement: {policy: spread}")
            await until(lambda: bool(it.told))
            it.source.ask()
            await until(lambda: len(lines) == 2)
            await asyncio.sleep(0.1)
            why = f"{path} can't be read: its file system gives no answer"
            assert it.told == [("rejected", f"the previous settings stay in effect: {why}")]
            assert [line["reason"] for line in lines] == [why] * 2  # a request is always answered in the log
            it.answers.set()
            await until(lambda: len(it.told) == 2)
            assert it.told[1] == ("reloaded", "applied: placement.policy")


async def test_the_same_reason_is_recorded_once(path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with following(path) as it:
            rewrite(path, "placement: {policy: sprad}")
            await until(lambda: len(lines) == 1)
            for times in range(2, 5):
                it.source.ask()
                await until(partial(lambda times: len(lines) == times, times))
            assert [code for code, _ in it.told] == ["rejected"]
            for number, text in enumerate(("placement: {policy: spred}", "{}", "placement: {policy: spred}"), start=2):
                rewrite(path, text)
                await until(partial(lambda number: len(it.told) == number, number))
            assert [code for code, _ in it.told] == ["rejected", "rejected", "reloaded", "rejected"]


async def test_a_long_list_of_errors_is_cut(path: Path) -> None:
    async with following(path) as it:
        rewrite(path, "".join(f"a{n}: 1\n" for n in range(1000)))
        await until(lambda: bool(it.told))
        assert len(it.told[0][1]) < 5000
