"""Any sequence of Prepare, Unprepare, restarts, duplicates and calls at the same time keeps every GPU within its capacity, gives each
prepared claim one answer, and ends empty."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumgr.allocator.claims import ClaimRef, PreparedDevice
from gpumgr.errors import Refusal
from gpumgr.units import Amounts
from tests.component.stage.stage import snapshot, unlimited
from tests.unit.agent.test_claims import Node
from tests.unit.agent.world import World

GPUS, CLAIMS, MEBIBYTES = 2, 5, 80 * 256
Call = tuple[Literal["prepare", "unprepare"], int]

shares = st.lists(
    st.tuples(st.integers(0, GPUS - 1), st.one_of(st.integers(1, 60), st.just(100)), st.integers(1, MEBIBYTES // 2)),
    min_size=1,
    max_size=2,
)
calls = st.lists(st.tuples(st.sampled_from(["prepare", "unprepare"]), st.integers(0, CLAIMS - 1)), min_size=1, max_size=4)
steps = st.lists(st.one_of(calls, st.just("restart"), st.just("disk full")), max_size=12)


@settings(deadline=None, max_examples=60)
@given(st.lists(shares, min_size=CLAIMS, max_size=CLAIMS), steps)
def test_any_sequence(claims: list[list[tuple[int, int, int]]], steps: list[list[Call] | str]) -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(_play(claims, steps, Path(folder)))


async def _play(claims: list[list[tuple[int, int, int]]], steps: list[list[Call] | str], folder: Path) -> None:
    node = Node(await World.made(snapshot(GPUS, 80), limits=unlimited(folder)))
    refs = [
        node.claim(f"c{n}", *(node.share(*share, request=f"r{i}", number=i) for i, share in enumerate(shares)))
        for n, shares in enumerate(claims)
    ]
    answers: dict[str, list[PreparedDevice]] = {}

    async def call(what: str, ref: ClaimRef) -> None:
        await asyncio.sleep(0)
        try:
            if what == "unprepare":
                await node.claims.unprepare(ref)
            else:
                answer = await node.prepare(ref)
                if node.world.ledger.of_claim(ref.uid):
                    assert answers.setdefault(ref.uid, answer) == answer
        except Refusal:
            pass
        if not node.world.ledger.of_claim(ref.uid):
            answers.pop(ref.uid, None)

    async def pause() -> None:
        await asyncio.sleep(0)

    node.reader.before_answer = pause
    for step in steps:
        if isinstance(step, list):
            await asyncio.gather(*(call(what, refs[number]) for what, number in step))
        elif step == "restart":
            await node.world.restart()
            node.start()
        else:
            node.world.checkpoint.full = not node.world.checkpoint.full
        _check(node, answers)
    node.world.checkpoint.full = False
    for ref in refs:
        await node.claims.unprepare(ref)
    assert not node.world.checkpoint.allocations
    assert all(node.world.ledger.used(gpu.name) == Amounts() for gpu in node.world.ledger.gpu_registry.gpus)


def _check(node: Node, answers: Collection[str]) -> None:
    ledger = node.world.ledger  # checks the invariants
    assert dict(ledger.allocations) == node.world.checkpoint.allocations
    for gpu in ledger.gpu_registry.gpus:
        used = ledger.used(gpu.name)
        assert used.cores <= 100
        assert used.memory_mebibytes <= MEBIBYTES
    for uid in answers:
        assert ledger.of_claim(uid)
