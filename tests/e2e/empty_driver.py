"""A DRA driver that prepares nothing, for comparison: it has our sockets, reads no claim and records nothing.

`python -m tests.e2e.empty_driver PLUGINS_DIR REGISTRY_DIR`; SIGTERM ends it. It publishes no ResourceSlice.
"""

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from gpumgr.kubelet.dra.registration import DraDriver
from gpumgr.ledger.ledger import Allocation, ClaimRef


class Nothing:
    async def prepare(self, _claim: ClaimRef, *, deadline: float) -> Sequence[Allocation]:  # noqa: ARG002
        return ()

    async def unprepare(self, _claim: ClaimRef) -> None:
        return


async def serve(plugins: Path, registry: Path) -> None:
    driver = DraDriver(plugins, registry, None, "node")
    driver.plugin.decide_with(Nothing())
    running = asyncio.create_task(driver.link.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    await asyncio.wait([running])
    await driver.link.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
