"""Pods through the real call order of a kubelet: placement and refusals."""

from pathlib import Path

import pytest

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
