"""What decides in mode dra which GPUs are offered, and whether the node may change its mode."""

from pathlib import Path
from typing import Any

import pytest

from gpumgr.agent.inventory import Inventory
from gpumgr.allocator.claims import ClaimRef
from gpumgr.allocator.ledger import Allocation, ClaimRequest, Ledger
from gpumgr.allocator.pods import ClaimUse, PodKey, PodView
from gpumgr.app.dra_side import CORDONED_TAINT, UNHEALTHY_TAINT, adopt, gpu_taints, holders_of_other_mode
from gpumgr.dra.claim_reader import allocated_here
from gpumgr.dra.slices import Taint
from gpumgr.errors import Refusal
from gpumgr.kubeapi.client import ApiServer
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.apiserver_written import failure
from tests.component.dra.resources import Resources
from tests.component.stage.stage import MemoryPods, snapshot

CLAIM = ClaimRequest(uid="u", namespace="team", name="c", request="gpu")


def ledger(*holders: tuple[str, ClaimRequest | None]) -> Ledger:
    result = Ledger()
    for name, claim in holders:
        pod: PodKey = ("team", name)
        result = result.occupy(Allocation(id=name, pod=pod, container="main", claim=claim))
    return result


def test_a_node_waits_for_the_pods_of_the_other_mode() -> None:
    mixed = ledger(("by-plugin", None), ("by-claim", CLAIM))
    for mode, holder, other in (("dra", "by-plugin", "by-claim"), ("plugin", "by-claim", "by-plugin")):
        reason = holders_of_other_mode(mixed, mode) or ""
        assert f"team/{holder} (main)" in reason
        assert other not in reason
        assert f"node.mode is {mode}" in reason
    assert holders_of_other_mode(ledger(("by-claim", CLAIM)), "dra") is None
    assert holders_of_other_mode(Ledger(), "plugin") is None


def test_only_five_holders_are_named() -> None:
    reason = holders_of_other_mode(ledger(*((f"p{n}", None) for n in range(9))), "dra") or ""
    assert "and 4 more" in reason
    assert "p5" not in reason


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_a_failed_gpu_has_the_taint_of_the_settings_and_a_cordoned_one_its_own(effect: str) -> None:
    node = snapshot(3)
    uuids = [gpu.uuid for gpu in node.gpus]
    inventory = Inventory(snapshot=node, failed={uuids[0]: "XID 79"}, cordoned={uuids[0]: "maintenance", uuids[1]: "maintenance"})
    registry = inventory.register(Ledger().gpu_registry)
    names = [gpu.name for gpu in registry.gpus]
    assert effect in ("NoSchedule", "NoExecute")
    found = gpu_taints(registry, inventory, "NoExecute" if effect == "NoExecute" else "NoSchedule")
    assert {gpu: [(taint.key, taint.effect) for taint in taints] for gpu, taints in found.items()} == {
        names[0]: [(UNHEALTHY_TAINT, effect)],
        names[1]: [(CORDONED_TAINT, "NoSchedule")],
    }
    assert Taint(key=CORDONED_TAINT) in found[names[1]]


@pytest.mark.parametrize(
    ("status", "here"),
    [
        (None, False),
        ({}, False),
        ({"allocation": None}, False),
        ({"allocation": {"devices": {"results": [{"driver": "gpu.gpumgr.io", "pool": "n1"}]}}}, True),
        ({"allocation": {"devices": {"results": [{"driver": "gpu.gpumgr.io", "pool": "n2"}]}}}, False),
        ({"allocation": {"devices": {"results": [{"driver": "nic.example.com", "pool": "n1"}]}}}, False),
    ],
)
def test_claims_of_this_node(status: object, here: bool) -> None:
    assert allocated_here({"status": status}, "n1") is here


def user(name: str, *, phase: str = "Running") -> PodView:
    use = ClaimUse(container="main", claim=f"of-{name}")
    return PodView(namespace="team", name=name, uid=name, phase=phase, claims=(use,))


async def test_after_a_loss_of_the_ledger_every_claim_of_the_nodes_pods_is_prepared(tmp_path: Path) -> None:
    sim = SimApiServer("n1")
    resources, prepared = Resources(sim), list[ClaimRef]()

    async def prepare(ref: ClaimRef) -> None:
        prepared.append(ref)
        if ref.name == "of-refused":
            raise Refusal("conflict", "too much")

    def claim(uid: str, pool: str = "n1") -> Any:
        results = [{"driver": "gpu.gpumgr.io", "pool": pool}]
        return {"metadata": {"uid": uid}, "status": {"allocation": {"devices": {"results": results}}}}

    views = [user(name) for name in ("a", "elsewhere", "gone", "odd", "refused", "z")] + [user("ended", phase="Failed")]
    pods = MemoryPods({view.key: view for view in views})
    claims: dict[str, Any] = {
        "a": claim("1"),
        "elsewhere": claim("2", "n2"),
        "odd": {"status": 3},
        "refused": claim("4"),
        "z": claim("5"),
        "ended": claim("6"),
    }
    resources.claims |= {("team", f"of-{name}"): item for name, item in claims.items()}
    async with sim:
        server = await ApiServer.connect(sim.kubeconfig(tmp_path / "kubeconfig"))
        try:
            resources.claim_answers.append(failure(500, "InternalError", "etcd has no leader"))
            assert await adopt(server, "n1", pods, prepare) == "AnswerError: HTTP 500: etcd has no leader"
            assert prepared == []
            assert await adopt(server, "n1", pods, prepare) is None
        finally:
            await server.close()
    assert [(ref.namespace, ref.name, ref.uid) for ref in prepared] == [
        ("team", "of-a", "1"), ("team", "of-refused", "4"), ("team", "of-z", "5"),
    ]  # fmt: skip
