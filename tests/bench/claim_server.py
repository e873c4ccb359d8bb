"""A program beside a benchmark: the simulated API server with ResourceClaims. Its argument is a file with a JSON list of them.

It writes the path of a kubeconfig beside that file to standard output when it is ready, and ends when its standard input does.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from gpumgr.sim.apiserver import SimApiServer
from tests.component.kubelet.dra.resources import Resources


async def serve(claims: list[Any], kubeconfig: Path) -> None:
    sim = SimApiServer("bench")
    resources = Resources(sim)
    for claim in claims:
        resources.claims[claim["metadata"]["namespace"], claim["metadata"]["name"]] = claim
    async with sim:
        print(sim.kubeconfig(kubeconfig), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    asyncio.run(serve(json.loads(file.read_text()), file.with_name("kubeconfig")))
