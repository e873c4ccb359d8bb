"""The results as JSON and as Markdown. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tests.hardware.measure import MechanismResult, ShareResult, TorchLoad, TorchMemory


def as_json(machine: Mapping[str, Any], results: Sequence[MechanismResult]) -> str:
    """`machine`: facts about it; units are in the names."""
    return json.dumps({"machine": machine, "mechanisms": [asdict(each) for each in results]}, indent=1) + "\n"


def as_markdown(machine: Mapping[str, Any], results: Sequence[MechanismResult]) -> str:
    return "\n".join(_lines(machine, results)) + "\n"


def _lines(machine: Mapping[str, Any], results: Sequence[MechanismResult]) -> Iterator[str]:
    yield "# Limits measured on a GPU"
    yield ""
    yield ", ".join(f"{name}: {value}" for name, value in machine.items())
    yield ""
    yield "*Rate*: launches per second, in per cent of a tenant without limits that is alone on the GPU and does the same work per launch."
    yield "*Granted*: what the tenant could allocate; *refused*: the error of the next allocation."
    for result in results:
        yield from ("", f"## {result.mechanism}", "", f"The agent uses: {result.uses or 'nothing'}.")
        if result.obstacle is not None:
            yield from ("", f"**Not measured to the end:** {result.obstacle}")
        title = "| tenants | cores | rate | memory limit | total that CUDA shows | granted | refused | in the agent's metrics |"
        together = [_row("two at once", share) for share in result.together]
        yield from _table(title, [*(_row("one", share) for share in result.alone), *together])
        yield from _table("| tenants with PyTorch | cores | load | rate |", list(map(_load, result.torch_loads)))
        yield from _table("| allocator of PyTorch | memory limit | granted | refused |", list(map(_memory, result.torch_memory)))
        if result.logged:
            yield from ("", "Warnings of the agent:", "", *(f"* {line}" for line in result.logged))


def _table(title: str, rows: Sequence[str]) -> Iterator[str]:
    """Nothing without rows."""
    if rows:
        yield from ("", title, "|---" * (title.count("|") - 1) + "|", *rows)


def _load(each: TorchLoad) -> str:
    tenants = "one" if each.tenants == 1 else f"{each.tenants} at once"
    return f"| {tenants} | {each.cores} % | {each.load} | {each.rate_percent:.1f} % |"


def _memory(each: TorchMemory) -> str:
    granted = f"{each.limit_bytes >> 20} MiB | {each.granted_bytes >> 20} MiB"
    return f"| {each.allocator} | {granted} | {each.refusal or 'no'} |"


def _row(tenants: str, share: ShareResult) -> str:
    refused = {0: "no", 2: "out of memory"}.get(share.refusal, f"CUresult {share.refusal}")
    agent = "-" if share.agent_bytes is None else f"{share.agent_bytes / (1 << 20):.0f} MiB"
    return (
        f"| {tenants} | {share.cores} % | {share.rate_percent:.1f} % | {share.limit_bytes >> 20} MiB | {share.total_bytes >> 20} MiB "
        f"| {share.granted_bytes >> 20} MiB | {refused} | {agent} |"
    )
