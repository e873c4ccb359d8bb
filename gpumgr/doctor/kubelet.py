"""The kubelet: its folder for device plugins, and its PodResources API."""

import asyncio
import os
from pathlib import Path
from typing import Final

from grpclib.exceptions import GRPCError

from gpumgr.doctor.examine import aside
from gpumgr.doctor.finding import Finding, error, error_of, ok
from gpumgr.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error

IF_HUNG: Final = "the kubelet hangs: look at `journalctl -u kubelet` and restart it"
#: Unlike List it has no effect on the kubelet, so that it disturbs no admission beside a running agent.
_ALLOCATABLE: Final = "/v1.PodResourcesLister/GetAllocatableResources"


async def look_at_folder(folder: Path) -> Finding:
    """We must be able to make sockets there, and the kubelet must listen at its own."""
    name = "kubelet"
    if not await aside(folder.is_dir):
        return error(
            name,
            f"{folder} is no folder",
            "start the kubelet, or set kubelet.device_plugin_dir to <its --root-dir>/device-plugins",
        )
    if not await aside(lambda: os.access(folder, os.W_OK | os.X_OK)):
        return error(name, f"{folder} is not writable", "run gpumgr as root")
    socket = folder / "kubelet.sock"
    try:
        _, writer = await asyncio.open_unix_connection(str(socket))
    except OSError as exception:
        reason = exception.strerror or str(exception)
        return error(
            name,
            f"nobody answers at {socket} ({reason})",
            "start the kubelet (`systemctl status kubelet`), or, if its --root-dir is another, set kubelet.device_plugin_dir",
        )
    writer.close()
    return ok(name, f"listens at {socket}")


async def look_at_pod_resources(socket: Path, *, timeout_seconds: float) -> Finding:
    name = "pod-resources"
    channel = UnixChannel(socket)
    try:
        await channel.unary(_ALLOCATABLE, b"", bytes, timeout_seconds=timeout_seconds)
    except GRPCError:
        pass  # it answers, if only that it can't: that is another call than the agent's
    except CALL_FAILURES as exception:
        known = kubelet_error("ask for the pod resources", socket, exception)
        return error_of(name, known, "start the kubelet, or set kubelet.pod_resources_socket")
    finally:
        channel.close()
    return ok(name, f"answers at {socket}")
