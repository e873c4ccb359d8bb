"""All checks of a node, from the driver upwards."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from gpumgr.doctor import (
    backends,
    choice,
    folders,
    gpus,
    host_paths,
    http,
    kubelet,
    ledger,
    other_programs,
    rights,
    runtime,
    takeover,
)
from gpumgr.doctor.examine import LIMIT_SECONDS
from gpumgr.doctor.finding import Check
from gpumgr.nvml.driver import Nvml
from gpumgr.settings import Settings

#: Time limit for a peer's answer; shorter than the check's own limit, so that the check reports which peer did not answer.
_SECONDS: Final = LIMIT_SECONDS * 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where the checks find the host's files. A simulated node has its own library and sysfs, no kernel module and no device nodes.

    `in_pod`: the command runs in a container, which has its own folders.
    """

    library_path: str | None = None
    sysfs_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")
    simulated: bool = False
    in_pod: bool = False


def checks_for(settings: Settings, host: Host, *, before_start: bool = False) -> tuple[Check, ...]:
    """`before_start`: an agent with these settings is about to start on this node."""
    nvml_seconds = min(settings.nvml.call_timeout_seconds, LIMIT_SECONDS * 0.8)
    seen = gpus.Gpus(Nvml(library_path=host.library_path, timeout_seconds=nvml_seconds, sysfs_root=host.sysfs_root))
    words = folders.backend_words(settings)
    return (
        *_of_gpus(settings, host, seen),
        *_of_kubelet(settings),
        *_of_place(settings, host, before_start=before_start),
        *_of_runtime(settings, host, words),
        *_of_mechanisms(settings, host, words),
        Check(name=http.NAME, look=partial(http.look_at_http, settings.http), if_hung=http.IF_HUNG),
        Check(name="rbac", look=partial(rights.look_at_rights, settings, timeout_seconds=_SECONDS), if_hung=rights.IF_HUNG),
        Check(name=choice.NAME, look=partial(choice.look_at_choice, settings, seen, in_pod=host.in_pod), if_hung=choice.IF_HUNG),
    )


def _of_gpus(settings: Settings, host: Host, seen: gpus.Gpus) -> Iterator[Check]:
    driver = partial(gpus.look_at_driver, host.proc_root, simulated=host.simulated)
    nodes = partial(gpus.look_at_device_nodes, seen, settings.container.device_root, simulated=host.simulated)
    yield Check(name="driver", look=driver, if_hung=gpus.IF_HUNG)
    yield Check(name="nvml", look=partial(gpus.look_at_nvml, seen), if_hung=gpus.IF_HUNG)
    yield Check(name="device-nodes", look=nodes, if_hung=gpus.IF_HUNG)


def _of_kubelet(settings: Settings) -> Iterator[Check]:
    folder = partial(kubelet.look_at_folder, settings.kubelet.device_plugin_dir)
    pods = partial(
        kubelet.look_at_pod_resources,
        settings.kubelet.pod_resources_socket,
        needs_cdi=settings.enforcement.injection == "cdi",
        timeout_seconds=_SECONDS,
    )
    yield Check(name="kubelet", look=folder, if_hung=kubelet.IF_HUNG)
    yield Check(name="pod-resources", look=pods, if_hung=kubelet.IF_HUNG)


def _of_place(settings: Settings, host: Host, *, before_start: bool) -> Iterator[Check]:
    plugin_dir = settings.kubelet.device_plugin_dir
    plugins = partial(other_programs.look_at_plugins, plugin_dir)
    agent = partial(other_programs.look_at_agent, settings.process.lock_path, plugin_dir, before_start=before_start)
    paths = partial(host_paths.look_at_host_paths, dict(_host_folders(settings)), host.proc_root, in_pod=host.in_pod)
    places = partial(folders.look_at_folders, dict(folders.written(settings)))
    checkpoint = partial(ledger.look_at_checkpoint, settings.checkpoint.dir)
    theirs = partial(takeover.look_at_take_over, settings, timeout_seconds=_SECONDS)
    yield Check(name="plugins", look=plugins, if_hung=other_programs.IF_HUNG)
    yield Check(name="agent", look=agent, if_hung=other_programs.IF_HUNG)
    yield Check(name=host_paths.NAME, look=paths, if_hung=host_paths.IF_HUNG)
    yield Check(name=folders.NAME, look=places, if_hung=folders.IF_HUNG)
    yield Check(name=ledger.NAME, look=checkpoint, if_hung=ledger.IF_HUNG)
    yield Check(name=takeover.NAME, look=theirs, if_hung=takeover.IF_HUNG)


def _host_folders(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Folders that must be the host's: the kubelet, the runtime, other containers or the restarted agent read them."""
    yield "kubelet.device_plugin_dir", settings.kubelet.device_plugin_dir
    yield "kubelet.pod_resources_socket", settings.kubelet.pod_resources_socket.parent
    yield from folders.written(settings)


def _of_runtime(settings: Settings, host: Host, words: Collection[str]) -> Iterator[Check]:
    cri, enforcement = settings.cri, settings.enforcement
    version = partial(runtime.look_at_runtime, cri.socket, timeout_seconds=_SECONDS)
    cgroups = partial(runtime.look_at_cgroups, cri.cgroup_root, needs_v2="nvml-memory" in words, proc_root=host.proc_root)
    cdi = partial(
        runtime.look_at_cdi, enforcement.cdi_dir, cri.socket, used=enforcement.injection == "cdi", timeout_seconds=_SECONDS
    )
    yield Check(name="cri", look=version, if_hung=runtime.IF_HUNG)
    yield Check(name="cgroups", look=cgroups, if_hung=runtime.IF_HUNG)
    yield Check(name="cdi", look=cdi, if_hung=runtime.IF_HUNG)


def _of_mechanisms(settings: Settings, host: Host, words: Collection[str]) -> Iterator[Check]:
    hami_core, vcuda, run_dir = settings.hami_core, settings.vcuda, settings.enforcement.run_dir
    mps = partial(backends.look_at_mps, settings.mps, words, run_dir=run_dir, in_pod=host.in_pod, timeout_seconds=_SECONDS)
    first = partial(backends.look_at_library, "hami-core", hami_core.library_path, hami_core.library_sha256, words)
    second = partial(backends.look_at_library, "vcuda", vcuda.library_path, vcuda.library_sha256, words)
    yield Check(name="mps", look=mps, if_hung=backends.IF_HUNG)
    yield Check(name="hami-core", look=first, if_hung=backends.IF_HUNG)
    yield Check(name="vcuda", look=second, if_hung=backends.IF_HUNG)
