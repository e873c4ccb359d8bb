"""Pods through the real call order of a kubelet: placement and refusals."""

from pathlib import Path

import pytest

from gpumgr.sim.kubelet import SimContainer

from .stage import app, stage


@pytest.mark.peer_bug("B19: it drops its choice for whole GPUs without memory")
async def test_shares_pack_onto_one_gpu_and_whole_pods_take_the_rest(folder: Path) -> None:
    async with stage(folder) as node:
        shares = [node.pod(f"share-{n}", app(20, 3)) for n in range(5)]
        whole = node.pod("whole", app(100))
        pair = node.pod("pair", app(200, 20))
        for pod in (*shares, whole, pair):
            await node.run_all(pod)
        node.check_agreement(*shares, whole, pair)
        ledger = node.ledger
        assert {tuple(a.gpus) for pod in shares for a in ledger.of(("team", pod.name))} == {("00000000",)}
        assert [tuple(a.gpus) for a in ledger.of(("team", "whole"))] == [("00000001",)]
        assert [tuple(a.gpus) for a in ledger.of(("team", "pair"))] == [("00000002", "00000003")]


@pytest.mark.peer_bug("B18, B20: it rounds 150 cores down, and offers the sum of all GPUs' memory")
@pytest.mark.parametrize(
    ("container", "sentence"),
    [
        (app(50, 0), "50 cores asked without memory"),
        (app(0, 4), "asked without cores"),
        (app(150, 4), "must be a multiple of 100"),
        (app(50, 17), "no GPU has 50 cores and 17 memory blocks free; free: GPU0 (00000000) 100 cores and 16 memory blocks"),
    ],
)
async def test_refusals_are_sentences_in_the_pods_event(folder: Path, container: SimContainer, sentence: str) -> None:
    async with stage(folder) as node:
        status = await node.run(node.pod("wrong", container))
        assert (status.phase, status.reason) == ("Failed", "UnexpectedAdmissionError")
        assert sentence in (status.message or "")
        assert not node.ledger.allocations
        await node.run_all(node.pod("right", app(50, 4)))
