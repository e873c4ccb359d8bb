"""`python -m tools.walks [NAME...]`: the modules of gpumgr that a call enters, in the order in which it enters them.

A change is hard to follow through many modules, so the paths that the project takes most often have a bound
(tests/unit/tools/test_walks.py). Generated code does not count (`gpumgr/_pb`, dataclasses), nor do modules that are only imported.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from types import FrameType
from typing import Final

from tools import PROJECT

_ROOT: Final = f"{PROJECT / 'gpumgr'}/"
#: The title of a call, and the call.
Walk = tuple[str, Callable[[], object]]


async def modules_entered(call: Callable[[], object]) -> list[str]:
    """Such as "cluster/core/index", each once. The result of the call is awaited if it can be. Other threads are not watched."""
    found: dict[str, None] = {}

    def entered(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if (
            event == "call"
            and file.startswith(_ROOT)
            and not file.startswith(f"{_ROOT}_pb/")
            and frame.f_code.co_name != "<module>"
        ):
            found[file.removeprefix(_ROOT).removesuffix(".py")] = None

    sys.setprofile(entered)
    try:
        result = call()
        if isinstance(result, Awaitable):
            await result
    finally:
        sys.setprofile(None)
    return list(found)


async def filter_walks() -> AsyncIterator[Walk]:
    """`Extender.filter` on two nodes, for a share, whole GPUs, a pod that fits nowhere, and a pod without GPUs."""
    from tests.bench.bench_requests import Bench, pod
    from tests.bench.big_cluster import name_of

    bench = Bench(nodes=2, pods=4)
    containers = {"share": (50, 4), "whole GPUs": (200, 0), "fits nowhere": (1600, 0), "no GPU": (0, 0)}
    for number, (title, container) in enumerate(containers.items()):
        asked, names = bench.watches.parse_pod(pod(number, container)), [name_of(0), name_of(1)]
        yield title, lambda asked=asked, names=names: bench.extender.filter(asked, names, bench.index.node_set(names))  # type: ignore[misc]


async def snapshot_walks() -> AsyncIterator[Walk]:
    """`AgentState.set_snapshot` of the same GPUs, and of one GPU more, to the device lists of the kubelet."""
    from tests.component.stage.stage import snapshot
    from tests.unit.agent.world import World

    world = await World.made(snapshot(4))
    world.kubelet.update = lambda *_: None  # type: ignore[method-assign]
    for title, gpus in {"the same GPUs": snapshot(4), "one GPU more": snapshot(5)}.items():
        yield title, partial(world.agent_state.set_snapshot, gpus)


WALKS: Final[Mapping[str, Callable[[], AsyncIterator[Walk]]]] = {"filter": filter_walks, "snapshot": snapshot_walks}


async def _print(names: list[str]) -> None:
    for name in names or WALKS:
        every: dict[str, None] = {}
        async for title, call in WALKS[name]():
            found = await modules_entered(call)
            every |= dict.fromkeys(found)
            print(f"{name}, {title}: {len(found)} modules: {', '.join(found)}")
        print(f"{name}, together: {len(every)} modules")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"{', '.join(WALKS)}; all of them by default")
    asyncio.run(_print(parser.parse_args().names))
