"""Resident memory of HAMi's webhook while clients without a credential hold connections with unfinished bodies.

`python -m tests.bench.bench_bodies` prints one JSON object. `clients ADDRESS PORT COUNT BYTES` is the program of the clients.
"""

import asyncio
import ssl
import sys

from gpumgr.cluster.scheduler.hami_webhook import PATH, webhook_application
from gpumgr.cluster.scheduler.lifecycle import verb_server
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import WebhookSettings
from gpumgr.web.credentials import Certificates
from tests.bench import figures
from tests.bench.figures import resident_mib
from tests.component.web.scene import CERTIFICATES

#: Connections, and bytes of each body.
RUNS = {"150_bodies_of_8_mib": (150, 8 << 20), "800_connections": (800, 0)}


async def hold(address: str, port: int, count: int, size: int) -> None:
    """Sends all of each body but its last byte, then one line to standard output, and waits."""
    context = ssl.create_default_context(cafile=CERTIFICATES / "ca.crt")
    context.check_hostname = False
    at_once = asyncio.Semaphore(20)
    held = []

    async def one() -> None:
        async with at_once:
            try:
                _, writer = await asyncio.open_connection(address, port, ssl=context)
                held.append(writer)
                writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() if size else b"POST")
                for _ in range((size - 1) // 65536):
                    writer.write(b" " * 65536)
                    await writer.drain()
                writer.write(b" " * ((size - 1) % 65536 if size else 0))
                await writer.drain()
            except OSError:  # it was cut
                pass

    await asyncio.gather(*(one() for _ in range(count)))
    print("held", flush=True)
    await asyncio.Event().wait()


async def measure() -> dict[str, float]:
    tls = Certificates(CERTIFICATES / "server.crt", CERTIFICATES / "server.key", None, section="webhook")
    application = webhook_application(ReplicaResources(), WebhookSettings())
    listener = verb_server(application, ("127.0.0.1", 0), tls, stop_seconds=1)
    await listener.start()
    found = {}
    for name, numbers in RUNS.items():
        arguments = ("clients", *listener.address, *numbers)
        clients = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.bench.bench_bodies", *map(str, arguments), stdout=asyncio.subprocess.PIPE
        )
        assert clients.stdout is not None
        assert await clients.stdout.readline() == b"held\n"
        found[f"{name}_mib"] = resident_mib()
        clients.kill()
        await clients.wait()
    await listener.stop()
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["clients"]:
        asyncio.run(hold(sys.argv[2], *map(int, sys.argv[3:])))
    else:
        figures.main(measure, __doc__)
