"""The steps of the demo and their expected results, verified in the kubelet, in the checkpoint and on the pages."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from gpumgr.common.units import BLOCK_BYTES, CORE_RESOURCE, CORES_PER_GPU, MEMORY_RESOURCE, VCUDA_NAMES, GpuName
from gpumgr.ledger.ledger import Allocation
from gpumgr.sim.demo.node import Facts, SimulatedNode
from gpumgr.sim.demo.process import Line
from gpumgr.sim.kubelet import PodStatus, SimContainer, SimPod

_XID: Final = 79
#: The reason of a pod that the kubelet fails because a device plugin refused it.
_REFUSED: Final = "UnexpectedAdmissionError"
#: The interval of reads of the agent's metrics.
_LOOK_SECONDS: Final = 0.1

#: (pod, container, GPU's UUID)
Place = tuple[str, str, str]


class UnexpectedResultError(Exception):
    """A step had another result than expected."""


class Step(msgspec.Struct, frozen=True):
    """`play` returns a description of the result, or raises UnexpectedResultError."""

    name: str
    play: Callable[[], Awaitable[str]]


class Script:
    """The steps, in order."""

    def __init__(self, node: SimulatedNode, now: Callable[[], float]) -> None:
        self._node, self._now = node, now
        self._pods: dict[str, SimPod] = {}

    @property
    def steps(self) -> tuple[Step, ...]:
        return (
            Step("the agent starts", self.start),
            Step("shares are packed", self.shares),
            Step("a share without memory", lambda: self.refused("no-memory", _app(20), "20 cores requested without memory")),
            Step("150 cores", lambda: self.refused("odd-size", _app(150, 4), "must be a multiple of 100")),
            Step("a share too big", lambda: self.refused("too-big", _app(60, 400), "no GPU has 60 cores and 400 memory")),
            Step("a whole GPU", lambda: self.whole_gpus("whole", 1, "fragment")),
            Step("four GPUs", lambda: self.whole_gpus("quad", 4, "link")),
            Step("two GPUs", lambda: self.whole_gpus("pair", 2, "link")),
            Step("an init container", self.init_container),
            Step("kill -9 of the agent", self.kill),
            Step("a kubelet restart", self.kubelet_restart),
            Step("free GPUs are reused", self.reuse),
            Step("a GPU fails", self.failure),
            Step("the GPU recovers", self.recovery),
            Step("a GPU is cordoned", self.cordon),
            Step("usage is reported", self.usage),
        )

    @property
    def last_step(self) -> Step:
        return Step("the agent stops", self.stop)

    # -- the steps ---------------------------------------------------------------------------------------------------------

    async def start(self) -> str:
        node, began = self._node, self._now()
        await node.start_agent()
        seconds = self._now() - began
        status, gpus = node.kubelet.node_status(), await node.graph()
        cores, blocks = status[CORE_RESOURCE].allocatable, status[MEMORY_RESOURCE].allocatable
        _expect(cores == CORES_PER_GPU * len(gpus), f"{cores} cores are offered for {len(gpus)} GPUs")
        total = sum(gpu["memory_blocks"] for gpu in gpus)
        _expect(blocks == total, f"{blocks} memory blocks are offered of {total}")
        return f"{len(gpus)} GPUs: {cores} cores and {blocks} memory blocks offered after {seconds:.1f} s; page: {node.url}/"

    async def shares(self) -> str:
        places = [await self._granted_to(name, _app(cores, cores * 2)) for name, cores in {"a": 40, "b": 30, "c": 10}.items()]
        _expect(len(frozenset[GpuName]().union(*places)) == 1, f"three shares of 80 cores in all lie on {places}")
        (gpu,) = [gpu for gpu in await self._node.graph() if gpu["holders"]]
        _expect((gpu["cores_free"], len(gpu["holders"])) == (20, 3), f"/graph shows {gpu}")
        return f"40, 30 and 10 cores together on GPU{gpu['index']}, {gpu['cores_free']} left there; {(await self._decision('a'))['why']}"

    async def refused(self, name: str, container: SimContainer, sentence: str) -> str:
        before = self._node.ledger().allocations
        status = await self._run(name, container)
        _expect((status.phase, status.reason) == ("Failed", _REFUSED), f"the pod is {status.phase} ({status.reason})")
        _expect(sentence in (status.message or ""), f"the pod's event does not say {sentence!r}: {status.message}")
        _expect(self._node.ledger().allocations == before, "the refusal left something in the ledger")
        line = await self._node.agent_log.until("refused", pod=f"{self._pods[name].namespace}/{name}")
        self._delete(name)
        return f"refused: {line['reason'].partition(';')[0]}"

    async def whole_gpus(self, name: str, count: int, evaluator: str) -> str:
        names = await self._granted_to(name, _app(CORES_PER_GPU * count))
        _expect(len(names) == count, f"it holds ids of {len(names)} GPUs")
        used = [gpu for gpu in await self._node.graph() if gpu["name"] in names]
        _expect(all(len(gpu["holders"]) == 1 for gpu in used), "another container holds something there")
        _expect(len({gpu["numa_node"] for gpu in used}) == 1, "the GPUs lie on two sockets")
        line = await self._decision(name)
        _expect(line["evaluator"] == evaluator, f"placed by {line['evaluator']} instead of {evaluator}")
        return f"{_labels(used)}, by {evaluator}: {line['why']}"

    async def init_container(self) -> str:
        fetch = SimContainer(name="fetch", kind="init", cores=10, memory_blocks=8)
        await self._granted_to("init", fetch, _app(20, 20))
        pod, kubelet = self._pods["init"], self._node.kubelet
        for resource in VCUDA_NAMES:
            first, second = kubelet.held(pod.uid, "fetch", resource), kubelet.held(pod.uid, "main", resource)
            _expect(bool(first) and first < second, f"{resource}: main did not take over the ids of fetch")
        _expect(len(self._node.gpus_of(pod)) == 1, "the pod lies on two GPUs")
        return "main took over the 10 cores and 8 blocks of fetch, and 10 and 12 more on the same GPU"

    async def kill(self) -> str:
        node, before = self._node, self._node.ledger()
        await node.agent.kill()
        await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].allocatable == 0)
        began = self._now()
        await node.start_agent()
        seconds = self._now() - began
        _expect(node.ledger() == before, "the ledger is another one than before")
        shown = {holder["allocation"] for gpu in await node.graph() for holder in gpu["holders"]}
        _expect(shown == set(before.allocations), "/graph shows other allocations than before")
        return f"nothing lost: the same {len(before.allocations)} allocations, offered again {seconds:.1f} s after the start"

    async def kubelet_restart(self) -> str:
        node, before, began = self._node, self._node.ledger(), self._now()
        pid = node.agent.pid
        await node.kubelet.restart()
        await node.until_offered()
        seconds = self._now() - began
        _expect(node.agent.pid == pid, "the agent was started again")
        _expect(node.ledger() == before, "the ledger is another one than before")
        return f"registered again within {seconds:.1f} s, the agent went on, every pod kept its ids"

    async def reuse(self) -> str:
        before = self._node.gpus_of(self._pods["quad"])
        self._delete("quad")
        placed = await self.whole_gpus("next", 4, "link")
        after = self._node.gpus_of(self._pods["next"])
        _expect(after == before, f"the next four GPUs are {sorted(after)}, not {sorted(before)}")
        return f"quad was deleted, its GPUs were allocated again at once: {placed}"

    async def failure(self) -> str:
        node = self._node
        gone = node.gpus_of(self._pods["pair"])
        self._delete("pair")
        await node.agent_log.until("allocation_freed", holder="demo/pair (main)")
        free = [gpu for gpu in await node.graph() if gpu["name"] in gone]
        sick, other = free[0], free[1]
        node.control.xid(sick["index"], _XID)
        node.control.lose_gpu(sick["index"])
        await node.kubelet.until(lambda: not any(node.healthy(sick["name"]).values()))
        _expect(node.healthy(other["name"])["core"] == CORES_PER_GPU, f"{_label(other)} is not offered either")
        names = await self._granted_to("careful", _app(CORES_PER_GPU))
        _expect(names == {other["name"]}, f"the pod went to {names} instead of {_label(other)}")
        reason = (await self._gpu(sick["name"]))["takes_nothing_new"]
        return f"XID {_XID} on {_label(sick)}, all its ids Unhealthy ({reason}); the next pod went to {_label(other)}"

    async def recovery(self) -> str:
        node = self._node
        (sick,) = [gpu for gpu in await node.graph() if gpu["takes_nothing_new"]]
        node.control.restore_gpu(sick["index"])
        whole = {"core": CORES_PER_GPU, "memory": sick["memory_blocks"]}
        await node.kubelet.until(lambda: node.healthy(sick["name"]) == whole)
        names = await self._granted_to("trusting", _app(CORES_PER_GPU))
        _expect(names == {sick["name"]}, f"the pod went to {names} instead of {_label(sick)}")
        return f"{_label(sick)} answers well again and is offered; the next pod runs there"

    async def cordon(self) -> str:
        """An operator cordons a GPU and uncordons it; the pod on it runs until it ends."""
        node, reason = self._node, "its fan is loud"
        (gpu,), (other,) = (node.gpus_of(self._pods[name]) for name in ("careful", "trusting"))
        before, labels = node.ledger(), {name: _label(await self._gpu(name)) for name in (gpu, other)}
        await node.maintain("cordon", gpu, reason=reason)
        _expect(node.ledger() == before, "the ledger is another one than before")
        for name in ("careful", "trusting"):
            self._delete(name)
            await node.agent_log.until("allocation_freed", holder=f"demo/{name} (main)")
        names = await self._granted_to("lucky", _app(CORES_PER_GPU))
        _expect(names == {other}, f"the pod went to {names} instead of {labels[other]}")
        await node.maintain("uncordon", gpu)
        await node.kubelet.until(lambda: node.healthy(gpu)["core"] == CORES_PER_GPU)
        names = await self._granted_to("patient", _app(CORES_PER_GPU))
        _expect(names == {gpu}, f"the pod went to {names} instead of {labels[gpu]}")
        return (
            f"{labels[gpu]} ({reason}): its pod ran until it ended, the next went to {labels[other]}; uncordoned and used again"
        )

    async def usage(self) -> str:
        """The reported memory of each container on each of its GPUs appears, changes, and never exceeds what was granted."""
        capacity = {gpu["name"]: gpu for gpu in await self._node.graph()}
        granted = {
            (pod.name, container.name, capacity[name]["uuid"]): _granted_blocks(container, capacity[name]) * BLOCK_BYTES
            for pod, container, names in self._node.running()
            for name in names
        }
        first = await self._used(lambda used: all(used.get(place, 0) > 0 for place in granted))
        last = await self._used(lambda used: all(used[place] != first[place] for place in granted))
        for used in (first, last):
            over = [place for place, bytes_used in used.items() if bytes_used > granted.get(place, 0)]
            _expect(not over, f"more memory than granted is reported for {over}")
        containers = {(pod, container) for pod, container, _ in granted}
        before, after, total = (f"{sum(amounts.values()) / (1 << 30):.1f}" for amounts in (first, last, granted))
        return f"{len(containers)} containers use {before}, then {after} of their {total} GiB; see {self._node.url}/"

    async def stop(self) -> str:
        node, began = self._node, self._now()
        status = await node.agent.stop()
        seconds = self._now() - began
        _expect(status == 0, f"it ended with status {status}")
        left = [path.name for path in node.kubelet.plugin_folder.glob("gpumgr-*.sock")]
        _expect(not left, f"it left its sockets behind: {', '.join(left)}")
        return f"SIGTERM: ended with status 0 after {seconds:.1f} s, sockets removed"

    # -- helpers -----------------------------------------------------------------------------------------------------------

    async def _run(self, name: str, *containers: SimContainer) -> PodStatus:
        self._pods[name] = self._node.pod(name, *containers)
        return await self._node.run(self._pods[name])

    async def _granted_to(self, name: str, *containers: SimContainer) -> frozenset[GpuName]:
        status = await self._run(name, *containers)
        _expect(status.phase == "Running", f"pod {name} is {status.phase}: {status.message}")
        names = self._node.gpus_of(self._pods[name])
        granted = {gpu for a in self._allocations(name) for gpu in a.gpus}
        _expect(granted == names, f"the kubelet gave pod {name} ids of {sorted(names)}, the ledger granted {sorted(granted)}")
        return names

    def _allocations(self, name: str) -> list[Allocation]:
        pod = self._pods[name]
        return self._node.ledger().of((pod.namespace, pod.name), pod.uid)

    def _delete(self, name: str) -> None:
        self._node.delete(self._pods.pop(name))

    async def _used(self, wanted: Callable[[Mapping[Place, float]], bool]) -> Mapping[Place, float]:
        """Bytes that containers use, as soon as `wanted` is true for the metrics."""
        while not wanted(used := await self._node.memory_used()):  # noqa: ASYNC110 (it is another process)
            await asyncio.sleep(_LOOK_SECONDS)
        return used

    async def _decision(self, name: str) -> Line:
        return await self._node.agent_log.until("allocation_granted", pod=f"{self._pods[name].namespace}/{name}")

    async def _gpu(self, name: GpuName) -> Facts:
        (found,) = [gpu for gpu in await self._node.graph() if gpu["name"] == name]
        return found


def _app(cores: int, memory_blocks: int = 0) -> SimContainer:
    return SimContainer(name="main", cores=cores, memory_blocks=memory_blocks)


def _granted_blocks(container: SimContainer, gpu: Facts) -> int:
    return int(gpu["memory_blocks"]) if container.cores >= CORES_PER_GPU else container.memory_blocks


def _label(gpu: Mapping[str, object]) -> str:
    return f"GPU{gpu['index']}"


def _labels(gpus: list[Facts]) -> str:
    return ", ".join(map(_label, gpus))


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnexpectedResultError(otherwise)
