"""The kubelet's device manager as a pure table, driving the allocator's decisions without any I/O."""

from dataclasses import dataclass, field
from random import Random

from gpumgr.common.errors import Refusal
from gpumgr.common.units import RESOURCE_NAMES, RESOURCES, Resource
from gpumgr.ledger.callers import Caller, find_caller, reuser
from gpumgr.ledger.choose import Choice, Request, choose
from gpumgr.ledger.grant import grant
from gpumgr.ledger.ids import Masks, count, minus
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.node import NodeView
from gpumgr.ledger.sweep import freed_by_offer, not_shown, shown
from gpumgr.placement.pods import ContainerSpec, Listing, PodKey, PodView

from .nodes import node_of


@dataclass
class Table:
    """What a kubelet knows: pods, and which ids each container of each pod holds. `ledger` is the plugin's side."""

    ledger: Ledger
    random: Random = field(default_factory=lambda: Random(1))
    node: NodeView | None = None
    pods: dict[PodKey, PodView] = field(default_factory=dict)
    held: dict[tuple[PodKey, str], dict[Resource, set[str]]] = field(default_factory=dict)
    reusable: dict[Resource, set[str]] = field(default_factory=dict)
    granted: list[Allocation] = field(default_factory=list)
    obeys: bool = True

    def listing(self) -> Listing:
        """As kubelet 1.34+: active pods, without ordinary init containers."""
        return Listing.of(
            {
                key: {
                    c.name: {RESOURCE_NAMES[kind]: sorted(ids) for kind, ids in self.held.get((key, c.name), {}).items()}
                    for c in view.containers
                    if c.kind != "init"
                }
                for key, view in self.pods.items()
            }
        )

    def admit(self, view: PodView) -> None:
        """Raises Refusal as the kubelet would fail the pod; what the pod got until then is the kubelet's again."""
        self.pods[view.key] = view
        self.reusable = {kind: set() for kind in RESOURCES}
        try:
            for container in view.containers:
                kinds = [kind for kind in RESOURCES if container.wants(kind)]
                self.random.shuffle(kinds)
                for kind in kinds:
                    self._allocate(view, container, kind)
                for kind in RESOURCES:
                    mine = self.held.get((view.key, container.name), {}).get(kind, set())
                    self.reusable[kind] = self.reusable[kind] | mine if container.kind == "init" else self.reusable[kind] - mine
        except Refusal:
            self.end(view.key)
            raise

    def end(self, key: PodKey) -> None:
        """The pod is over; its ids are free for the next admission."""
        del self.pods[key]
        self.held = {owner: ids for owner, ids in self.held.items() if owner[0] != key}

    def _in_use(self, kind: Resource) -> set[str]:
        return set().union(*(ids.get(kind, set()) for ids in self.held.values()))

    def _allocate(self, view: PodView, container: ContainerSpec, kind: Resource) -> None:
        size = container.wants(kind)
        every = [text for texts in self.ledger.gpu_registry.ids[kind].values() for text in texts]
        reused = set(self.random.sample(sorted(self.reusable[kind]), min(size, len(self.reusable[kind]))))
        chosen, choice, caller = reused, None, None
        if len(reused) < size:
            available = [text for text in every if text not in self._in_use(kind)]
            if len(available) < size - len(reused):
                raise Refusal("no_fit", "requested number of devices unavailable")
            choice, caller = self._prefer(kind, {*available, *reused}, reused, size)
            wanted = set(self.ledger.gpu_registry.format(kind, choice.masks)) if self.obeys else set()
            chosen = reused | set(sorted(wanted & set(available))[: size - len(reused)])
            rest = [text for text in available if text not in chosen]
            self.random.shuffle(rest)
            chosen = chosen | set(rest[: size - len(chosen)])
        masks = self.ledger.gpu_registry.parse(kind, chosen)
        allocation = grant(
            self._node(),
            self.ledger,
            caller or self._caller_of(masks, kind, size),
            kind,
            masks,
            new_id=f"a{len(self.granted)}",
            now=float(len(self.granted)),
            why=choice.why if choice else "",
        )
        self.ledger = self.ledger.occupy(allocation).check()
        self.granted.append(allocation)
        self.held.setdefault((view.key, container.name), {})[kind] = chosen

    def _prefer(self, kind: Resource, available: set[str], reused: set[str], size: int) -> tuple[Choice, Caller]:
        parse = self.ledger.gpu_registry.parse
        request = Request(resource=kind, available=parse(kind, available), must=parse(kind, reused), size=size)
        offered = self.ledger.holders(kind, minus(request.available, request.must))
        listing = self.listing()
        visible = shown(self.ledger.gpu_registry, listing)
        gone = not_shown(offered, visible, listing, self.pods.get)
        self.ledger = freed_by_offer(self.ledger, gone.values(), visible, listing, self.pods.get).check()
        seen = {key: n for n, key in enumerate(self.pods)}
        caller = find_caller(self.ledger, self.listing(), self.pods.get, kind, size, seen)
        assert caller is not None, "the pod under admission must be found"
        choice = choose(self._node(), self.ledger, caller, request)
        assert count(choice.masks) == size
        return choice, caller

    def _caller_of(self, masks: Masks, kind: Resource, size: int) -> Caller:
        left_by = reuser(self.ledger, kind, masks)
        assert left_by is not None
        assert left_by.pod is not None
        view = self.pods[left_by.pod]
        seen = {key: n for n, key in enumerate(self.pods)}
        found = find_caller(self.ledger, self.listing(), self.pods.get, kind, size, seen)
        assert found is not None
        assert found.view == view
        return found

    def _node(self) -> NodeView:
        return self.node or node_of(self.ledger.gpu_registry)
