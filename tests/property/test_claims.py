"""Any sequence of Prepare, Unprepare, restarts, duplicates and calls at the same time, with pods that start, end and vanish, and claims
that are reserved for others or allocated anew: every GPU stays within its capacity, each prepared claim has one answer, a late Prepare
grants nothing, no claim in use is reclaimed, and it ends empty."""

import asyncio
from collections.abc import Collection, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr._pb.k8s.io.kubelet.pkg.apis.dra.v1 import Device
from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts
from gpumgr.ledger.claims import Share
from gpumgr.ledger.ledger import ClaimRef
from gpumgr.placement.pods import ClaimUse, Listing, PodKey, PodView
from tests.component.stage.stage import snapshot, unlimited
from tests.unit.agent.test_claims import Node
from tests.unit.agent.world import World

GPUS, CLAIMS, MEBIBYTES = 2, 5, 80 * 256
Call = tuple[Literal["prepare", "unprepare"], int]
EVENTS = ("runs", "ends", "is deleted", "is gone", "is joined", "is replaced", "is moved")
Amount = tuple[int, int, int]
#: Calls at the same time, or what happens to one claim and its pods, or to the node.
Step = list[Call] | tuple[list[str], int] | str

shares = st.lists(
    st.tuples(st.integers(0, GPUS - 1), st.one_of(st.integers(1, 60), st.just(100)), st.integers(1, MEBIBYTES // 2)),
    min_size=1,
    max_size=2,
)
numbers = st.integers(0, CLAIMS - 1)
calls = st.lists(st.tuples(st.sampled_from(["prepare", "unprepare"]), numbers), min_size=1, max_size=4)
life = st.tuples(st.lists(st.sampled_from(["prepare", "unprepare", *EVENTS]), min_size=1, max_size=6), numbers)
steps = st.lists(st.one_of(calls, life, life, st.sampled_from(["restart", "disk full", "reclaim"])), max_size=8)


@settings(deadline=None, max_examples=100)
@given(st.lists(shares, min_size=CLAIMS, max_size=CLAIMS), steps)
def test_any_sequence(claims: list[list[Amount]], steps: list[Step]) -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(Play(claims).run(steps, Path(folder)))


class Play:
    """`answers`: what the kubelet has of prepared claims. `unprepared`: the claims that this process has unprepared."""

    def __init__(self, claims: list[list[Amount]]) -> None:
        self._claims = claims
        self.answers: dict[str, list[Device]] = {}
        self.unprepared: set[str] = set()
        self._number = 0

    async def run(self, steps: list[Step], folder: Path) -> None:
        self.node = node = Node(await World.made(snapshot(GPUS, 80), limits=unlimited(folder)))
        self.refs = [
            node.claim(f"c{n}", *(node.share(*share, request=f"r{i}", number=i) for i, share in enumerate(shares)))
            for n, shares in enumerate(self._claims)
        ]

        async def pause() -> None:
            await asyncio.sleep(0)

        node.reader.before_answer = pause
        for step in steps:
            if isinstance(step, list):
                await self._call_all(step)
            elif isinstance(step, tuple):
                for event in step[0]:
                    if event in ("prepare", "unprepare"):
                        await self._call_all([(event, step[1])])
                    else:
                        self._happens(event, self.refs[step[1]])
            elif step == "restart":
                await node.world.restart()
                node.start()
                self.unprepared.clear()
            elif step == "reclaim":
                await self._reclaim()
            else:
                node.world.checkpoint.full = not node.world.checkpoint.full
            self._check()
        node.world.checkpoint.full = False
        for ref in self.refs:
            await node.claims.unprepare(ref)
        assert not node.world.checkpoint.allocations
        assert all(node.world.ledger.used(gpu.name) == Amounts() for gpu in node.world.ledger.gpu_registry.gpus)

    async def _call_all(self, calls: Iterable[tuple[str, int]]) -> None:
        late = {uid for uid in self.unprepared if not self._needing(uid)}
        await asyncio.gather(*(self._call(what, self.refs[number], late) for what, number in calls))

    async def _call(self, what: str, ref: ClaimRef, late: Collection[str]) -> None:
        await asyncio.sleep(0)
        node, refused = self.node, ""
        try:
            if what == "unprepare":
                self.unprepared.add(ref.uid)
                await node.claims.unprepare(ref)
            else:
                known = bool(node.world.ledger.of_claim(ref.uid))
                answer = await node.prepare(ref)
                assert known or ref.uid not in late, "a late Prepare is granted"
                if node.world.ledger.of_claim(ref.uid):
                    assert {(each.device_name, each.share_id) for each in answer} == self._shares(ref.uid)
                    assert self.answers.setdefault(ref.uid, answer) == answer
        except Refusal as refusal:
            refused = str(refusal)
        assert "was unprepared, and" not in refused or not self._fresh(ref.uid), "a pod that waits is refused"
        if not node.world.ledger.of_claim(ref.uid):
            self.answers.pop(ref.uid, None)

    def _happens(self, event: str, ref: ClaimRef) -> None:
        """To the claim's pods, or to the claim once they are gone: it can't be allocated anew before."""
        node, views, claims = self.node, self.node.world.pods.views, self.node.reader.claims
        changes = {"runs": {"phase": "Running"}, "ends": {"phase": "Succeeded"}, "is deleted": {"deleted": True}}
        if event == "is joined":
            claims[ref.uid] = replace(claims[ref.uid], pods=(*claims[ref.uid].pods, self._new_pod(ref)))
            return
        for key, _ in claims[ref.uid].pods:
            if event in changes and key in views and not views[key].ended:
                views[key] = replace(views[key], **changes[event])  # type: ignore[arg-type]
            elif event not in changes:
                views.pop(key, None)
        if event in ("is replaced", "is moved"):
            claims[ref.uid] = replace(claims[ref.uid], pods=(self._new_pod(ref),))
        if event == "is moved":
            self.answers.pop(ref.uid, None)
            moved = tuple(replace(each, share_id=f"share-{self._number}-{each.share_id}") for each in claims[ref.uid].shares)
            claims[ref.uid] = replace(claims[ref.uid], shares=moved)
        assert node.world.pods.synced

    def _new_pod(self, ref: ClaimRef) -> tuple[PodKey, str]:
        """It is Pending."""
        self._number += 1
        view = PodView(
            namespace="team",
            name=f"new-{self._number}",
            uid=f"new-{self._number}",
            claims=(ClaimUse(container="main", claim=ref.name),),
        )
        self.node.world.pods.views[view.key] = view
        return view.key, view.uid

    async def _reclaim(self) -> None:
        """The kubelet lists the claims of present pods; the API server has the claims that are reserved for a pod."""

        async def find(ref: ClaimRef) -> tuple[str, Collection[Share]]:
            return (ref.uid, self._shares(ref.uid)) if self._alive(ref.uid) else ("", ())

        ledger = self.node.world.ledger
        used = [ref for ref in self.refs if ledger.of_claim(ref.uid) and self._alive(ref.uid)]
        listing = Listing.of({}, {(ref.namespace, ref.name) for ref in used})
        for _ in range(2):
            try:
                await self.node.claims.reclaim(find, listing)
            except Refusal:  # the disk is full
                return
        for ref in self.refs:
            assert bool(self.node.world.ledger.of_claim(ref.uid)) == (ref in used)
            if ref not in used:
                self.answers.pop(ref.uid, None)

    def _views(self, uid: str) -> list[PodView]:
        return [
            view
            for key, _ in self.node.reader.claims[uid].pods
            if (view := self.node.world.pods.views.get(key)) is not None and not view.ended
        ]

    def _alive(self, uid: str) -> bool:
        return bool(self._views(uid))

    def _needing(self, uid: str) -> bool:
        return any(not view.deleted for view in self._views(uid))

    def _fresh(self, uid: str) -> bool:
        return any(view.phase == "Pending" and not view.deleted for view in self._views(uid))

    def _shares(self, uid: str) -> set[Share]:
        return {(share.device, share.share_id) for share in self.node.reader.claims[uid].shares}

    def _check(self) -> None:
        ledger = self.node.world.ledger  # checks the invariants
        assert dict(ledger.allocations) == self.node.world.checkpoint.allocations
        for gpu in ledger.gpu_registry.gpus:
            used = ledger.used(gpu.name)
            assert used.cores <= 100
            assert used.memory_mebibytes <= MEBIBYTES
        for uid in self.answers:
            assert ledger.of_claim(uid)
