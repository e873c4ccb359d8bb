"""Bursts: what the agent of the node answers about the limits of its GPUs."""

from pathlib import Path

import msgspec
import pytest

from gpumgr.cli.examination.enforcement import look_at_bursts
from gpumgr.settings import Settings
from tests.component.cli.fake_agent import FakeAgent

GIB = 1 << 30


def settings(folder: Path, *, burst: bool = True) -> Settings:
    default = Settings()
    return msgspec.structs.replace(
        default,
        enforcement=msgspec.structs.replace(default.enforcement, memory_burst=burst),
        http=msgspec.structs.replace(default.http, socket=folder / "agent.sock"),
    )


@pytest.mark.parametrize(
    ("excess", "message"),
    [
        ([0, None], "the memory limits of containers exceed the memory of no GPU"),
        (
            [3 * GIB, GIB],
            "the memory limits of the containers on GPU0 exceed its memory by 3.0 GiB; the memory limits of the "
            "containers on GPU1 exceed its memory by 1.0 GiB",
        ),
    ],
)
async def test_the_excess_of_limits(folder: Path, excess: list[int | None], message: str) -> None:
    agent = FakeAgent(folder / "agent.sock")
    names = ("aaaa0000", "bbbb1111")
    agent.state["gpus"] = [
        {"uuid": f"GPU-{name}", "name": name, "index": index, "limits_excess_bytes": size}
        for index, (name, size) in enumerate(zip(names, excess, strict=True))
    ]
    await agent.start()
    found = await look_at_bursts(settings(folder), timeout_seconds=10)
    await agent.stop()
    assert (found.state, found.message) == ("ok", message)


async def test_without_burst_or_agent_nothing_is_checked(folder: Path) -> None:
    off = await look_at_bursts(settings(folder, burst=False), timeout_seconds=10)
    assert (off.state, off.message) == ("skipped", "not used: enforcement.memory_burst is off")
    away = await look_at_bursts(settings(folder), timeout_seconds=10)
    assert away.state == "skipped"
    assert "the agent does not run on this node" in away.message
