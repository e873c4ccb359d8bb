"""Pods through the real call order of a kubelet: placement, attribution, reuse, freeing, refusals."""

from pathlib import Path
from random import Random

import pytest

from gpumgr.agent.inventory import HardwareHealth
from gpumgr.common.units import CORE_RESOURCE
from gpumgr.sim.kubelet import SimContainer

from .stage import app, snapshot, stage


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


@pytest.mark.peer_bug("B3, B4: it guesses a pod by its number of cores and its age")
@pytest.mark.parametrize("seed", range(2))
async def test_every_attribution_is_right_in_any_order_of_resources(folder: Path, seed: int) -> None:
    random = Random(seed)
    async with stage(folder, node=snapshot(8, 320), seed=seed) as node:
        pods = [node.pod(f"p{n}", app(random.choice([5, 10, 20]), random.choice([5, 10, 20]))) for n in range(40)]
        random.shuffle(pods)
        for pod in pods:
            await node.run_all(pod)
        node.check_agreement(*pods)


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


@pytest.mark.peer_bug("B1: after an error of the driver it does not try again")
async def test_an_unhealthy_gpu_is_not_offered_until_it_is_healthy(folder: Path) -> None:
    async with stage(folder, node=snapshot(2)) as node:
        uuid = node.agent.agent_state.inventory.snapshot.gpus[0].uuid
        await node.agent.agent_state.set_health(HardwareHealth(failed={uuid: "XID 79"}, cordoned={}))
        await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].allocatable == 100)
        pods = [node.pod("a", app(60, 4)), node.pod("b", app(60, 4))]
        await node.run_all(pods[0])
        status = await node.run(pods[1])
        assert "GPU0 (00000000) not offered (XID 79)" in (status.message or "") or "devices unavailable" in (status.message or "")
        assert [tuple(a.gpus) for a in node.ledger.allocations.values()] == [("00000001",)]
        await node.agent.agent_state.set_health(HardwareHealth(failed={}, cordoned={}))
        await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].allocatable == 200)
        node.clock.now += 5
        await node.run_all(node.pod("c", app(60, 4)))
