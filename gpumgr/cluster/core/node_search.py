"""Searches the nodes for one request: the fitting nodes in order, or the reasons why no node fits.

docs/scheduler.md describes the policies. Among nodes that are equal for a policy, the one with better connected GPUs is first. If a pod has
one policy for nodes and another for GPUs, nodes are compared as in HAMi's scheduler: by the used part of all their GPUs.

For a share of one GPU, the search compares rooms (equal GPUs with equal use) and runs no evaluator. For other requests, GPUs are chosen
once for each profile (nodes that differ only by name), and the profile keeps the rank. For each group of nodes, the search first computes
the lowest rank that one of its nodes can have. It skips the group if this rank is worse than the ranks of the best nodes so far.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import reduce
from heapq import nlargest, nsmallest
from itertools import groupby
from operator import attrgetter, itemgetter, or_
from typing import Final

from msgspec.structs import replace

from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose, lack_of
from gpumgr.cluster.core.node import GpuState, NodeState, Used, plus_taken
from gpumgr.cluster.core.profiles import FreeCores, Profile, Profiles, Rank, Ranked, Room, idle_gpus, taken_cores, tight_cores
from gpumgr.cluster.core.request import NOTHING, ContainerRequest, GpuType, PodRequest, Policy
from gpumgr.common.units import CORES_PER_GPU
from gpumgr.placement.requests import UNCONSTRAINED

#: The maximum number of fitting profiles that a search compares: _MOST_CHOICES / (number of the pod's containers), or _FEWEST_PROFILES if
#: that is more. To explain a rejection, the search examines the same number of profiles.
_MOST_CHOICES: Final = 1024
_FEWEST_PROFILES: Final = 32
#: The rank of a node without the CPU that the pod requests. kube-scheduler rarely offers such a node.
_LAST: Final = 1 << 60
#: (rank, node, room of a share there); room None: the GPUs must be chosen first.
Found = tuple[Rank, str, Room | None]


class _Best:
    """The best nodes so far, unordered."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._worst: Rank | None = None
        self.found: list[Found] = []

    def may_take(self, least: Rank) -> bool:
        """Whether a node with the rank `least` may be among the best. `least` may also be the first part of a rank."""
        return self._worst is None or least <= self._worst

    def add(self, found: Iterable[Found]) -> None:
        self.found += found
        if self.most is not None and len(self.found) >= self.most:
            self.found = nsmallest(self.most, self.found, key=_rank_and_name)
            self._worst = self.found[-1][0]


class Ranking:
    """Computes the ranks of nodes. `cpu_per_core`: what an average pod requests for one core of a GPU, in thousandths of a CPU."""

    def __init__(self, request: PodRequest, policy: Policy, cpu_per_core: int) -> None:
        self._request, self._policy, self._cpu_per_core = request, policy, cpu_per_core
        self._by_cpu = policy == "least-fragmentation" and request.node_policy is None

    def of(self, node: NodeState, used: Used, choice: NodeChoice) -> Ranked:
        after, request = plus_taken(used, choice.taken), self._request
        if request.node_policy is not None:
            return Ranked(_by_use(node, after, request.node_policy, choice.score))
        sharing = zip(request.containers, choice.shares, strict=True)
        shared = {gpu for container, shares in sharing if not container.whole for gpu, _ in shares}
        cores = sum(CORES_PER_GPU - after[gpu].cores for gpu in shared)
        memory = sum(node.gpus[gpu].memory_mebibytes - after[gpu].memory_mebibytes for gpu in shared)
        free = idle_gpus(node, after)
        whole = any(container.whole for container in request.containers)
        rank = _by_policy(self._policy, (free, cores, memory) if whole else (cores, memory, free), choice.score)
        if not self._by_cpu:
            return Ranked(rank)
        tight = sum(
            tight_cores(after[gpu].cores - used[gpu].cores, CORES_PER_GPU - after[gpu].cores, entirely_free=used[gpu] == NOTHING)
            for gpu in shared
        )
        return Ranked(rank, taken_cores(node, used, after, choice.taken)._replace(tight=tight))

    def of_share(self, cores: int, memory_mebibytes: int, idle: int, taken: FreeCores) -> Ranked:
        """`cores`, `memory_mebibytes`: what the share leaves on its GPU. `idle`: the number of idle GPUs that the share leaves on the
        node."""
        rank = _by_policy(self._policy, (cores, memory_mebibytes, idle))
        return Ranked(rank, taken if self._by_cpu else None)

    def exact(self, ranked: Ranked, before: FreeCores, cpu_free: int | None) -> Rank:
        """The rank of one node. `before`: the node's free cores. `cpu_free`: its free CPU in thousandths; None: not known."""
        rank, taken = ranked
        return rank if taken is None else (self._stranded(before, taken, cpu_free), *rank)

    def least(self, ranked: Ranked, *, short_of_cpu: bool) -> Rank:
        """The lowest rank that a node can have. `short_of_cpu`: the node has less free CPU than its usable cores need."""
        rank, taken = ranked
        if taken is None:
            return rank
        well_used = self._request.cpu_milli if short_of_cpu else taken.usable * self._cpu_per_core
        return well_used - (taken.free + taken.tight) * self._cpu_per_core, *rank

    def _stranded(self, before: FreeCores, taken: FreeCores, cpu_free: int | None) -> int:
        """How many cores the pod strands (makes unusable for lack of CPU or memory) if it takes `taken` of `before`, minus `taken.tight`.
        The result is multiplied by `cpu_per_core`, so that it is an integer."""
        cpu_milli, per_core = self._request.cpu_milli, self._cpu_per_core
        free, usable = before.free * per_core, before.usable * per_core
        free_after, usable_after = free - taken.free * per_core, usable - taken.usable * per_core
        if cpu_free is not None:
            if cpu_milli > cpu_free:
                return _LAST
            usable, usable_after = min(usable, cpu_free), min(usable_after, cpu_free - cpu_milli)
        return max(0, free_after - usable_after) - max(0, free - usable) - taken.tight * per_core

    def least_in_rooms(self, cores_free: int, share: ContainerRequest) -> Rank:
        """A lower bound of the first part of ranks, for GPUs with at least `cores_free` free cores (policy spread: at most)."""
        most = CORES_PER_GPU if share.replica is not None else share.cores
        least = 1 if share.replica is not None else share.cores
        if self._by_cpu:
            return ((cores_free - 3 * most) * self._cpu_per_core,)
        if self._policy == "spread":
            return (least - cores_free,)
        return _by_policy(self._policy, (cores_free - most,))[: 2 if self._policy == "topology" else 1]


class NodeSearch:
    """The search for one request under one policy. `offered`, `nodes`: sets of nodes, as bits (see `profiles`)."""

    def __init__(self, request: PodRequest, policy: Policy, profiles: Profiles, *, keep: bool) -> None:
        """`keep`: ranks are kept in the profiles, for later calls; otherwise in this object."""
        self.request, self.policy = request, policy
        self._own: dict[Profile, Ranked | Misfit] | None = None if keep else {}
        self._profiles, self._ranking = profiles, Ranking(request, policy, profiles.cpu_per_core)
        self._gpu_request = request.without_cpu
        self._key = request.gpu_digest, request.denied, policy
        one_policy, containers = request.node_policy is None, request.containers
        self._share = containers[0] if one_policy and len(containers) == 1 and _is_share(containers[0]) else None
        self._whole = one_policy and all(each.whole for each in containers)
        self._enough = max(_FEWEST_PROFILES, _MOST_CHOICES // max(1, len(containers)))
        self._has_replicas = any(each.replica is not None for each in containers)
        #: How many idle GPUs a node needs.
        self._whole_gpus = max((each.gpus for each in containers if each.whole), default=0)
        shares = {(each.cores, each.memory_blocks) for each in containers if _is_share(each) and each.replica is None}
        #: For each (cores, memory blocks) a node needs a GPU with so much free.
        self._largest = {max(shares), max(shares, key=itemgetter(1))} if shares else set()
        constraints = request.constraints
        #: Whether only some of the GPUs with room are allowed.
        of_each = constraints != UNCONSTRAINED and (constraints.of_single_gpus or constraints.unused)
        self._restricted = of_each or bool(request.denied)
        #: (UUID, type, has MIG devices) -> whether the GPU is allowed.
        self._allowed: dict[tuple[str, GpuType, bool], bool] = {}

    # -- nodes that fit ----------------------------------------------------------------------------------------------------

    def fitting(self, offered: int, most: int | None, *, enough: int | None = None) -> list[Found]:
        """The nodes that fit, the best first. With `most`, profiles are tried in the order of their nodes' names until `enough` of them
        fit. `enough` None: `most`, or the limit that `_MOST_CHOICES` sets, if that is more."""
        best = _Best(most)
        if not self.request.constraints.use_uuids:  # otherwise only nodes with the named GPUs fit, and Question ranks these nodes
            apart = self._apart
            if self._share is not None:
                self._in_rooms(self._share, offered & ~apart, best)
                offered &= apart
            if offered:
                self._in_profiles(offered, best, enough)
        return sorted(best.found, key=_rank_and_name)

    def in_room(self, room: Room, name: str) -> NodeChoice:
        """The choice for a share: the node's first GPU in this room."""
        assert self._share is not None, "only shares have rooms"
        place = self._profiles.places[name]
        gpus = zip(place.kind.gpus, place.profile.used, strict=True)
        position = next(position for position, (gpu, used) in enumerate(gpus) if used == room.used and gpu == room.gpu)
        amounts = self._share.on(room.gpu.memory_mebibytes, room.gpu.scaling)
        return NodeChoice(shares=(((position, amounts),),), taken={position: amounts})

    def rank_on(self, name: str, choice: NodeChoice) -> Rank:
        place = self._profiles.places[name]
        ranked = self._ranking.of(place.state, place.profile.used, choice)
        return self._ranking.exact(ranked, place.profile.cores, place.cpu_free)

    def examine(self, offered: int, most: int | None, *, reasons: bool) -> Iterator[None]:
        """Computes what `fitting` needs, one choice per step. With `reasons` it also computes what `misfits` needs. Without `reasons`, one
        fitting profile is enough, unless `most` is None."""
        if self.request.constraints.use_uuids:
            return
        offered &= -1 if self._share is None else self._apart
        fits = False
        for _, found in self._choices(offered, most, None if reasons else 1):
            fits = fits or isinstance(found, Ranked)
            yield
        for profile in self._nearest(offered)[0] if reasons and not fits else ():
            self.examined(profile)
            yield

    def examined(self, profile: Profile) -> Ranked | Misfit:
        """The rank of the profile's nodes, or why they do not fit."""
        if (found := self._kept(profile)) is None:
            choice = choose(profile.state, profile.used, self._gpu_request, self.policy)
            # The chosen GPUs (of up to 64 containers) and users' texts can need much memory, so they are not kept. On the best node the
            # GPUs are chosen again.
            if isinstance(choice, NodeChoice):
                found = self._ranking.of(profile.state, profile.used, choice)
            else:
                found = replace(choice, constraints=UNCONSTRAINED)
            if self._own is None:
                profile.keep(self._key, found)
            else:
                self._own[profile] = found
        return found

    def _may_fit(self, profile: Profile) -> bool:
        """A quick check, which chooses no GPUs and excludes most profiles that do not fit."""
        least = NOTHING if self._has_replicas else self.request.in_total
        if (
            profile.idle_gpus < self._whole_gpus
            or profile.cores.free < least.cores
            or profile.memory_free < least.memory_mebibytes
        ):
            return False
        return all(
            any(room.offered and room.cores_free >= cores and room.blocks_free >= blocks for room in profile.rooms)
            for cores, blocks in self._largest
        )

    def _choices(self, offered: int, most: int | None, enough: int | None) -> Iterator[tuple[Profile, Ranked | Misfit]]:
        """The profiles that may fit, with the results of `examined`."""
        if self._whole_gpus:
            offered &= self._profiles.with_idle_gpus(self._whole_gpus)
        profiles = self._profiles.there(offered, idle=self._whole)
        left = len(profiles) if most is None else enough or max(most, self._enough)
        if left < len(profiles):
            places = self._profiles.in_order(offered)
            profiles = list(dict.fromkeys(each.profile.idle if self._whole else each.profile for each in places))
        for profile in profiles:
            if (found := self._kept(profile)) is None:
                if not self._may_fit(profile):
                    continue
                found = self.examined(profile)
            yield profile, found
            left -= isinstance(found, Ranked)
            if not left:
                return

    def _kept(self, profile: Profile) -> Ranked | Misfit | None:
        return profile.choices.get(self._key) if self._own is None else self._own.get(profile)

    @property
    def _apart(self) -> int:
        """Nodes where one GPU alone does not decide whether a share fits: nodes with MIG devices. If only some GPUs are allowed, also nodes
        where the agent chooses the GPU."""
        return self._profiles.with_mig | (self._profiles.unnamed if self._restricted else 0)

    def _nearest(self, offered: int) -> tuple[list[Profile], list[Profile]]:
        profiles = self._profiles.there(offered, idle=self._whole)
        nearest = dict.fromkeys(nlargest(self._enough, profiles, key=self._free_in))
        return list(nearest), [each for each in profiles if each not in nearest]

    def _free_in(self, profile: Profile) -> tuple[int, int, int]:
        return profile.idle_gpus if self._whole_gpus else 0, profile.cores.free, profile.memory_free

    def _in_profiles(self, offered: int, best: _Best, enough: int | None) -> None:
        alike = defaultdict[Ranked, int](int)
        for profile, found in self._choices(offered, best.most, enough):
            if isinstance(found, Ranked):
                alike[found] |= profile.nodes & offered
        groups = [(least, nodes, ranked) for ranked, both in alike.items() for least, nodes in self._with_least(ranked, both)]
        for least, nodes, ranked in sorted(groups, key=_least):
            if not best.may_take(least):
                return
            self._add(nodes, None, least, ranked, best)

    def _with_least(self, ranked: Ranked, nodes: int) -> list[tuple[Rank, int]]:
        """Splits nodes with the same `ranked` by whether they are short of CPU. For each part that has nodes, returns (the lowest rank that
        one of its nodes can have, the part)."""
        short = nodes & self._profiles.short_of_cpu
        parts = ((False, nodes & ~short), (True, short))
        return [(self._ranking.least(ranked, short_of_cpu=is_short), part) for is_short, part in parts if part]

    # -- rooms of a share --------------------------------------------------------------------------------------------------

    def _in_rooms(self, share: ContainerRequest, left: int, best: _Best) -> None:
        """`left`: nodes where no GPU is found yet. Rooms are tried in the order in which a node's agent prefers them."""
        rooms, least_cores = self._profiles.rooms_of(left), 1 if share.replica is not None else share.cores
        start = bisect_left(rooms, (least_cores, 0), key=_by_key)
        ordered = reversed(rooms[start:]) if self.policy == "spread" else iter(rooms[start:])
        for _, alike in groupby(ordered, key=_tier if share.replica is None else _by_key):
            if not left:
                return
            fits = [room for room in alike if room.nodes & left and self._fits(room, share)]
            if not fits:
                continue
            if not best.may_take(self._ranking.least_in_rooms(fits[0].cores_free, share)):
                return
            twice = seen = 0
            for room in fits:
                twice, seen = twice | seen & room.nodes, seen | room.nodes
            for room in fits:
                self._in_room(room, share, left & ~twice, best)
            if twice & left:  # nodes with several of these rooms: the GPUs' positions decide which the share gets
                self._in_profiles(twice & left, best, None)
            left &= ~seen

    def _in_room(self, room: Room, share: ContainerRequest, left: int, best: _Best) -> None:
        wanted = share.on(room.gpu.memory_mebibytes, room.gpu.scaling)
        cores, memory, taken = room.cores_free - wanted.cores, room.memory_free - wanted.memory_mebibytes, room.taken_by(wanted)
        for idle, there in sorted(self._profiles.by_idle_gpus.items(), reverse=self.policy == "spread"):
            ranked = self._ranking.of_share(cores, memory, idle - room.idle, taken)
            for least, nodes in self._with_least(ranked, room.nodes & there & left):
                if best.may_take(least):
                    self._add(nodes, room, least, ranked, best)

    def _add(self, nodes: int, room: Room | None, least: Rank, ranked: Ranked, best: _Best) -> None:
        """Adds nodes with ranks that differ at most in what the pod strands. `least`: a lower bound of their ranks."""
        found: list[Found] = []
        left = best.most
        for place in self._profiles.in_order(nodes):
            found.append((self._ranking.exact(ranked, place.profile.cores, place.cpu_free), place.name, room))
            if left is not None and found[-1][0] == least:
                left -= 1
                if not left:  # the remaining nodes have the same rank or a higher one, and their names are later in the alphabet
                    break
        best.add(found)

    def _fits(self, room: Room, share: ContainerRequest) -> bool:
        if not (self._is_allowed(room.gpu) and room.offered) or (self.request.constraints.unused and room.used != NOTHING):
            return False
        if share.replica is None:
            return room.cores_free >= share.cores and room.blocks_free >= share.memory_blocks
        wanted = share.on(room.gpu.memory_mebibytes, room.gpu.scaling)
        return (wanted.memory_mebibytes > 0 or wanted.whole) and room.gpu.has_room(room.used, wanted)

    def _is_allowed(self, gpu: GpuState) -> bool:
        if not self._restricted:
            return True
        key = gpu.uuid, gpu.type, bool(gpu.mig)
        if key not in self._allowed:
            allowed = self.request.constraints.allows(gpu.uuid, gpu.model, mig=bool(gpu.mig))
            self._allowed[key] = allowed and gpu.type not in self.request.denied
        return self._allowed[key]

    # -- nodes that do not fit ---------------------------------------------------------------------------------------------

    def misfits(self, offered: int) -> Iterator[tuple[int, str, Misfit | None]]:
        """(number of nodes, the node that lacks least, its Misfit or None if it was not computed), for each group of nodes. Call this only
        if no node fits."""
        with_gpus = offered & self._profiles.with_gpus
        yield from self._first(offered & ~with_gpus)
        if self.request.constraints.use_uuids:
            yield from self._first(with_gpus)
            return
        if self._share is not None:
            apart = self._apart
            yield from self._without_room(self._share, with_gpus & ~apart)
            with_gpus &= apart
        nearest, others = self._nearest(with_gpus)
        for profile in nearest:
            found, nodes = self.examined(profile), profile.nodes & with_gpus
            assert isinstance(found, Misfit), "no node fits"
            yield nodes.bit_count(), self._first_name(nodes), replace(found, constraints=self.request.constraints)
        if rest := reduce(or_, (each.nodes for each in others), 0) & with_gpus:
            yield rest.bit_count(), self._first_name(rest), Misfit(container=None, less=True, distance=float("inf"))

    def _without_room(self, share: ContainerRequest, nodes: int) -> Iterator[tuple[int, str, None]]:
        allowed = nearest = 0
        least = float("inf")
        for room in self._profiles.rooms_of(nodes):
            if (here := room.nodes & nodes) and self._is_allowed(room.gpu):
                allowed |= here
                # With replicas no node is nearer than another: each lacks one GPU with room.
                if room.offered and share.replica is None:
                    full = self.request.constraints.unused and room.used != NOTHING
                    lack = lack_of(0 if full else room.cores_free, 0 if full else room.blocks_free, share)
                    if lack <= least:
                        nearest, least = here if lack < least else nearest | here, lack
        yield from self._first(nodes & ~allowed)
        if allowed:
            yield allowed.bit_count(), self._first_name(nearest or allowed), None

    def _first(self, nodes: int) -> Iterator[tuple[int, str, None]]:
        if nodes:
            yield nodes.bit_count(), self._first_name(nodes), None

    def _first_name(self, nodes: int) -> str:
        return min(self._profiles.names_of(nodes))


def _is_share(container: ContainerRequest) -> bool:
    return container.gpus == 1 and not container.whole


_by_key = attrgetter("key")
#: GPUs with equal tiers are equally good for a share in vcuda resources, so the share gets the first of these GPUs on the node.
_tier = attrgetter("cores_free", "blocks_free")
_least = itemgetter(0)
_rank_and_name = itemgetter(0, 1)


def _by_policy(policy: Policy, left: tuple[int, ...], score: int = 0) -> Rank:
    """The rank by a policy for nodes and GPUs. `left`: what the pod leaves on the node, the most important amount first. `score`: how well
    the pod's GPUs are connected."""
    ordered = tuple(-each for each in left) if policy == "spread" else left
    return (-score, *ordered) if policy == "topology" else (*ordered, -score)


def _by_use(node: NodeState, after: Used, policy: Policy, score: int) -> Rank:
    """The rank by the used part of the node's GPUs, as HAMi scores nodes (pkg/scheduler/policy/node_policy.go). The used parts of cores,
    memory and replicas are added, in parts per million."""
    in_use = 0
    for kind, capacity in (
        ("cores", CORES_PER_GPU * len(node.gpus)),
        ("memory_mebibytes", sum(gpu.memory_mebibytes for gpu in node.gpus)),
        ("replicas", sum(gpu.replicas for gpu in node.gpus)),
    ):
        in_use += 10**6 * sum(getattr(held, kind) for held in after) // capacity if capacity else 0
    order = in_use if policy == "spread" else -in_use
    return (-score, order) if policy == "topology" else (order, -score)
