"""The kubelet: its device plugin folder, its PodResources API, and the device plugins in the folder."""

import asyncio
import os
from contextlib import closing
from pathlib import Path
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from gpumgr.cli.examination.examine import PEER_SECONDS, CheckResult, aside, error, error_of, ok, skipped, warning
from gpumgr.common.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error
from gpumgr.kubelet.deviceplugin.other_plugins import answering, holder, problem_and_remedy

IF_HUNG: Final = "the kubelet hangs: look at `journalctl -u kubelet` and restart it"
#: The folder is a constant in Kubernetes' kubelet (pkg/kubelet/cm/devicemanager); kubelets of some distributions use another folder.
_FOLDER: Final = (
    "set kubelet.device_plugin_dir to the folder of its kubelet.sock: /var/lib/kubelet/device-plugins, whatever its --root-dir is"
)
#: Unlike List, Get has no effect on the kubelet, so it disturbs no admission beside a running agent. A call that names no pod gets an error
#: from every kubelet; kubelets before 1.27 answer that the method does not exist.
_GET: Final = "/v1.PodResourcesLister/Get"


async def look_at_folder(folder: Path) -> CheckResult:
    """The agent must be able to create sockets in the folder, and the kubelet must listen at its own socket."""
    if not await aside(folder.is_dir):
        return error(f"{folder} is no folder", f"start the kubelet, or {_FOLDER}")
    if not await aside(lambda: os.access(folder, os.W_OK | os.X_OK)):
        return error(f"{folder} is not writable", "run gpumgr as root")
    socket = folder / "kubelet.sock"
    try:
        _, writer = await asyncio.open_unix_connection(str(socket))
    except OSError as exception:
        reason = exception.strerror or str(exception)
        return error(
            f"no process answers at {socket} ({reason})", f"start the kubelet (`systemctl status kubelet`), or {_FOLDER}"
        )
    writer.close()
    return ok(f"listens at {socket}")


async def look_at_pod_resources(socket: Path, *, needs_cdi: bool, timeout_seconds: float = PEER_SECONDS) -> CheckResult:
    """Whether the kubelet answers and is new enough. `needs_cdi`: the agent's answers name CDI devices, which kubelets accept
    since 1.28 with a feature gate, and by default since 1.29."""
    try:
        with closing(UnixChannel(socket)) as channel:
            await channel.unary(_GET, b"", bytes, timeout_seconds=timeout_seconds)
    except GRPCError as answer:
        if "unknown service" in (answer.message or ""):  # an unknown method of a known service has another message
            return error(
                f"the kubelet at {socket} has no PodResources API v1, so it is older than 1.20",
                "upgrade it: without that API gpumgr can't determine which pod a request is for, and which pods have ended",
            )
        if needs_cdi and answer.status is Status.UNIMPLEMENTED:
            return error(
                f"the kubelet at {socket} is older than 1.27 and does not take CDI devices: pods would start without their GPUs",
                "set enforcement.injection to mounts, or upgrade the kubelet to 1.29 or newer",
            )
    except CALL_FAILURES as exception:
        known = kubelet_error("ask for the pod resources", socket, exception)
        return error_of(
            known, "start the kubelet, or set kubelet.pod_resources_socket to <its --root-dir>/pod-resources/kubelet.sock"
        )
    return ok(f"answers at {socket}")


async def look_at_plugins(folder: Path) -> CheckResult:
    """Whether another device plugin serves these GPUs."""
    if not await aside(folder.is_dir):
        return skipped(f"{folder} is no folder")
    found = await aside(lambda: answering(folder))
    if found:
        return error(*problem_and_remedy(found))
    return ok(f"no other plugin for NVIDIA's GPUs answers in {folder}")


async def look_at_agent(lock_path: Path, folder: Path, *, before_start: bool) -> CheckResult:
    """Whether a gpumgr agent runs on this node. `before_start`: one is about to start, so none may run."""
    process = await aside(lambda: holder(lock_path))
    if process is not None:
        running = f"runs on this node ({process}holds {lock_path})"
        if not before_start:
            return ok(f"it {running}")
        return error(
            f"another gpumgr {running}",
            "stop one of them: `systemctl disable --now gpumgr`, or keep the DaemonSet off this node by its nodeSelector",
        )
    if await aside(lambda: holder(folder)) is not None:
        message = f"another gpumgr with another process.lock_path than {lock_path} serves {folder}"
        if before_start:
            return error(message, "stop one of them, or they replace each other's sockets")
        return warning(message, "ask with its settings: gpumgr doctor --config FILE")
    return ok("none runs on this node")
