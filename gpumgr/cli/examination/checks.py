"""All checks of a node."""

import os
from functools import partial
from typing import Final

from gpumgr.cli.examination import (
    api_server,
    dra,
    driver_files,
    enforcement,
    folders,
    gpus,
    http,
    kubelet,
    runtime,
    takeover,
)
from gpumgr.cli.examination.examine import LIMIT_SECONDS, Check, CheckResult, warning
from gpumgr.driver.driver import Nvml
from gpumgr.driver.hardware import Hardware
from gpumgr.settings import Settings
from gpumgr.settings.profile import mig_offered, mig_on_demand

#: The time limit for a peer's answer. It is shorter than the check's own limit, so that the check reports which peer did not answer.
_SECONDS: Final = LIMIT_SECONDS * 0.4


def checks_for(settings: Settings, hardware: Hardware, *, in_pod: bool = False, before_start: bool = False) -> tuple[Check, ...]:
    """`in_pod`: the command runs in a container, which has its own folders. `before_start`: an agent with these settings is about to start
    on this node."""
    nvml_seconds = min(settings.nvml.call_timeout_seconds, LIMIT_SECONDS * 0.8)
    driver_answers = Nvml(
        library_path=hardware.library_path,
        timeout_seconds=nvml_seconds,
        sysfs_root=hardware.sysfs_root,
        unreported_memory_bytes=settings.nvml.unreported_memory_bytes,
    )
    seen = gpus.SharedNvml(driver_answers)
    words = folders.backend_words(settings)
    plugin_dir, pods_socket = settings.kubelet.device_plugin_dir, settings.kubelet.pod_resources_socket
    cri = settings.cri
    in_dra = settings.node.mode == "dra"
    uses_cdi = settings.enforcement.injection == "cdi" or in_dra
    written = dict(folders.written(settings))
    # Folders that must be mounted from the host: the kubelet, the runtime, other containers or the restarted agent read them.
    of_host = {"kubelet.device_plugin_dir": plugin_dir, "kubelet.pod_resources_socket": pods_socket.parent, **written}
    if in_dra:
        of_host |= {
            "kubelet.plugins_dir": settings.kubelet.plugins_dir,
            "kubelet.plugins_registry_dir": settings.kubelet.plugins_registry_dir,
        }
    pods = partial(kubelet.look_at_pod_resources, pods_socket, needs_cdi=uses_cdi, timeout_seconds=_SECONDS)
    # The second agent of a rolling update waits for the first.
    alone = before_start and settings.process.instance is None
    agent = partial(kubelet.look_at_agent, settings.process.lock_path, plugin_dir, before_start=alone)
    paths = partial(folders.look_at_host_paths, of_host, hardware.proc_root, in_pod=in_pod)
    cgroups = partial(runtime.look_at_cgroups, cri.cgroup_root, needs_v2="nvml-memory" in words, proc_root=hardware.proc_root)
    cdi = partial(runtime.look_at_cdi, settings.enforcement.cdi_dir, cri.socket, used=uses_cdi, timeout_seconds=_SECONDS)
    files = partial(driver_files.look_at_driver_files, settings, seen, simulated=hardware.simulated, timeout_seconds=_SECONDS)
    backends = enforcement.NodeBackends(settings, seen, hardware.proc_root, in_pod=in_pod)
    of_kubelet = Check("kubelet", partial(kubelet.look_at_folder, plugin_dir), kubelet.IF_HUNG)
    take_over = Check("take-over", partial(takeover.look_at_take_over, settings), takeover.IF_HUNG)
    return (
        *([] if os.geteuid() == 0 else [Check("user", _look_at_user, "")]),
        *_of_gpus(settings, hardware, seen),
        Check("mode", partial(dra.look_at_mode, settings.node.mode), ""),
        *(_of_claims(settings, seen) if in_dra else [of_kubelet]),
        Check("pod-resources", pods, kubelet.IF_HUNG),
        Check("plugins", partial(kubelet.look_at_plugins, plugin_dir), folders.IF_HUNG),
        Check("agent", agent, folders.IF_HUNG),
        Check("host-paths", paths, folders.IF_HUNG),
        Check("folders", partial(folders.look_at_folders, written), folders.IF_HUNG),
        Check("checkpoint", partial(folders.look_at_checkpoint, settings.checkpoint.dir), folders.IF_HUNG),
        *([] if in_dra else [take_over]),
        Check("cri", partial(runtime.look_at_runtime, cri.socket, timeout_seconds=_SECONDS), runtime.IF_HUNG),
        Check("cgroups", cgroups, runtime.IF_HUNG),
        Check("cdi", cdi, runtime.IF_HUNG),
        Check("driver-files", files, runtime.IF_HUNG),
        Check("limiter", backends.look_at_limiter, enforcement.IF_HUNG),
        Check("mps", partial(backends.look_at, "mps"), enforcement.IF_HUNG),
        Check("hami-core", backends.look_at_hami_core, enforcement.IF_HUNG),
        Check("vcuda", partial(backends.look_at, "vcuda"), enforcement.IF_HUNG),
        Check("burst", partial(enforcement.look_at_bursts, settings, timeout_seconds=_SECONDS), enforcement.IF_HUNG),
        Check("http", partial(http.look_at_http, settings.http), http.IF_HUNG),
        Check("rbac", partial(api_server.look_at_rights, settings, timeout_seconds=_SECONDS), api_server.IF_HUNG),
        Check("enforcement", backends.look_at_choice, enforcement.IF_HUNG),
    )


async def _look_at_user() -> CheckResult:
    return warning(
        f"this runs as user {os.geteuid()}, who may use less than root: files, folders and sockets may be reported that the agent can use",
        "run this as root, as the agent runs",
    )


def _of_gpus(settings: Settings, hardware: Hardware, seen: gpus.SharedNvml) -> tuple[Check, ...]:
    device_root = settings.container.device_root
    driver = partial(gpus.look_at_driver, hardware.proc_root, device_root, simulated=hardware.simulated)
    mig_devices = partial(gpus.look_at_mig_devices, seen, settings.checkpoint.dir)
    nodes = partial(gpus.look_at_device_nodes, seen, device_root, simulated=hardware.simulated)
    return (
        Check("driver", driver, gpus.IF_HUNG),
        Check("nvml", partial(gpus.look_at_nvml, seen, mig_offered=mig_offered(settings)), gpus.IF_HUNG),
        *([] if mig_on_demand(settings) is None else [Check("mig-devices", mig_devices, gpus.IF_HUNG)]),
        Check("device-nodes", nodes, gpus.IF_HUNG),
    )


def _of_claims(settings: Settings, seen: gpus.SharedNvml) -> tuple[Check, ...]:
    return (
        Check("dra-sockets", partial(dra.look_at_sockets, settings.kubelet), kubelet.IF_HUNG),
        Check("dra-slice", partial(dra.look_at_slice, settings, seen), api_server.IF_HUNG),
        Check("dra-claims", partial(dra.look_at_claims, settings), api_server.IF_HUNG),
    )
