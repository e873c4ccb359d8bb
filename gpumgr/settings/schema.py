"""Every setting: name, type, bounds and default. config/gpumgr.yaml explains each key; a test compares that file with this module.

The keys for requests of HAMi's resources are in `gpumgr.settings.hami_resources`.
"""

import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta, inspect

from gpumgr.settings.hami_resources import ReplicaResources

_NODE_NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"

#: Bounds of nvml.unreported_memory_mebibytes. The lower bound is two memory blocks of 256 MiB, the least capacity in a ResourceSlice.
LEAST_UNREPORTED_MEBIBYTES: Final = 512
MOST_UNREPORTED_MEBIBYTES: Final = 1 << 24

#: Marks a live setting, which takes effect without a restart: for later decisions, samples and writes. Existing grants do not change.
LIVE: Final = Meta(extra={"live": True})

Port = Annotated[int, Meta(ge=0, le=65535)]
Period = Annotated[float, Meta(ge=0.1, le=3600)]
Xid = Annotated[int, Meta(ge=0, le=65535)]
NodeName = Annotated[
    str,
    Meta(
        pattern=_NODE_NAME,
        max_length=253,
        extra={"allowed": "a node's name: lower-case letters, digits, '-' and '.', 253 at most"},
    ),
]
ObjectName = Annotated[
    str, Meta(pattern=_NODE_NAME, max_length=253, extra={"allowed": "a Kubernetes name: lower-case letters, digits, '-' and '.'"})
]
_SUBJECT = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
BackendName = Literal["limiter", "mps", "hami-core", "vcuda", "nvml-memory", "none"]
Override = Annotated[
    str,
    Meta(
        pattern=rf"^{_SUBJECT}(/[a-z0-9]([a-z0-9.-]*[a-z0-9])?)?=({'|'.join(get_args(BackendName))})$",
        extra={"allowed": "namespace=mechanism or namespace/serviceaccount=mechanism, such as batch=none"},
    ),
]
NodeLabel = Annotated[
    str,
    Meta(
        pattern=r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?=([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$",
        extra={"allowed": "key=value as in `kubectl label`, such as gaia.tencent.com/gpu-model="},
    ),
]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$", extra={"allowed": "64 hexadecimal digits, as sha256sum prints them"})]
MigProfileName = Annotated[
    str, Meta(pattern=r"^[1-9]g\.[1-9][0-9]*gb$", extra={"allowed": "the name of a MIG profile, such as 1g.10gb"})
]
HostName = Annotated[str, Meta(pattern=r"^[0-9A-Za-z.:_-]+$", extra={"allowed": "an IP address or a host's name"})]

#: The longest sample period with memory_burst. A container's start waits for two samples, and the kubelet waits 30 s for the start.
MOST_BURST_PERIOD_SECONDS: Final = 4.0


def _this_host() -> str:
    """The kubelet's default name of the node."""
    return socket.gethostname().lower()


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: NodeName = msgspec.field(default_factory=_this_host)
    #: The device plugin API, or Dynamic Resource Allocation.
    mode: Literal["plugin", "dra"] = "plugin"
    #: With mode plugin: the offered resources. tencent: vcuda-core and vcuda-memory. hami: nvidia.com/gpu.
    profile: Literal["tencent", "hami", "both"] = "tencent"
    #: How existing MIG devices are offered. single: as hami.count_resource. mixed: as nvidia.com/mig-<profile>.
    mig_strategy: Literal["none", "single", "mixed"] = "none"
    #: With mode dra: the effect of the taint of a GPU that does not work.
    unhealthy_taint_effect: Literal["NoSchedule", "NoExecute"] = "NoSchedule"


class HamiSettings(ReplicaResources, frozen=True, kw_only=True):
    """Adds settings of the node to the keys about requests."""

    #: How many containers may share a GPU.
    device_split_count: Annotated[int, Meta(ge=1, le=1000)] = 10
    #: mig: MIG devices are created for containers.
    operating_mode: Literal["hami-core", "mig"] = "hami-core"
    #: Empty: all profiles of the GPU.
    mig_profiles: tuple[MigProfileName, ...] = ()
    #: current: GPUs are registered for HAMi's scheduler 2.5 or newer.
    scheduler: Literal["current", "none"] = "current"


class KubeletSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Folder of kubelet.sock and of gpumgr's own sockets.
    device_plugin_dir: Path = Path("/var/lib/kubelet/device-plugins")
    pod_resources_socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    #: Used with node.mode dra, like the next one.
    plugins_dir: Path = Path("/var/lib/kubelet/plugins")
    plugins_registry_dir: Path = Path("/var/lib/kubelet/plugins_registry")
    #: The kubelet's policy. Unless it is none, gpumgr's scheduler chooses only the node, and the agent chooses the GPUs.
    topology_manager_policy: Literal["none", "best-effort", "restricted", "single-numa-node"] = "none"


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    dir: Path = Path("/var/lib/gpumgr")
    #: Read at the first start, and when the kubelet lists containers of gpu-manager that the ledger (the agent's list of grants) lacks.
    gpu_manager_checkpoint: Path = Path("/etc/gpu-manager/checkpoint/gpumanager_internal_checkpoint")

    @property
    def library_dir(self) -> Path:
        """Folder of installed libraries, which containers mount, and of compiled programs."""
        return self.dir / "lib"


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True):
    enabled: bool = True
    #: None: the service account of the agent's pod.
    kubeconfig: Path | None = None
    #: Deletes pods that the kubelet marked Failed because gpumgr refused them.
    delete_failed_pods: bool = False
    #: How long GetPreferredAllocation may wait for a pod that the agent's cache lacks.
    pod_wait_milliseconds: Annotated[int, Meta(ge=0, le=1000), LIVE] = 50
    annotate_pods: Annotated[bool, LIVE] = True
    write_events: Annotated[bool, LIVE] = True
    describe_node: Annotated[bool, LIVE] = True
    node_labels: Annotated[tuple[NodeLabel, ...], LIVE] = ()


class NvmlSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: None: the dynamic linker finds libnvidia-ml.so.1.
    library_path: Path | None = None
    #: A call that takes longer counts as hung.
    call_timeout_seconds: Annotated[float, Meta(ge=0.1, le=300)] = 5.0
    sample_period_seconds: Annotated[Period, LIVE] = 1.0
    load_kernel_modules: bool = False
    #: XID errors that an application causes and that leave the GPU healthy.
    ignored_xids: Annotated[tuple[Xid, ...], LIVE] = (13, 31, 43, 45, 68, 109)
    #: How long the notification READY to systemd waits for the driver.
    ready_grace_seconds: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    #: Memory of a GPU for which the driver reports none (GB10). None: such a GPU is granted as a whole only.
    unreported_memory_mebibytes: Annotated[int, Meta(ge=LEAST_UNREPORTED_MEBIBYTES, le=MOST_UNREPORTED_MEBIBYTES)] | None = None
    #: The driver's program that resets a GPU.
    smi_program: Annotated[str, Meta(min_length=1)] = "nvidia-smi"

    @property
    def unreported_memory_bytes(self) -> int | None:
        return None if self.unreported_memory_mebibytes is None else self.unreported_memory_mebibytes << 20


class PlacementSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: A share is placed on the fullest (binpack) or the emptiest (spread) GPU with enough free.
    policy: Annotated[Literal["binpack", "spread"], LIVE] = "binpack"
    share_mode: Annotated[bool, LIVE] = True


class ContainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    device_root: Path = Path("/dev")
    #: auto: the toolkit if the default runtime is NVIDIA's, else mounts.
    driver_files: Literal["auto", "toolkit", "mounts"] = "auto"
    #: The driver's files for the backend vcuda, with its library instead of libcuda.
    driver_share_dir: Path = Path("/etc/gpu-manager/vdriver/nvidia")
    #: The driver's files for all other containers.
    driver_whole_dir: Path = Path("/etc/gpu-manager/vdriver/origin")
    #: Has a folder for each allocation, which is mounted at /etc/vcuda.
    allocation_dir: Path = Path("/etc/gpu-manager/vm")
    extra_devices: tuple[Path, ...] = ()


class EnforcementSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: auto: limiter, and the driver's memory limits where the node has them.
    backend: Literal["auto", BackendName] = "auto"
    #: Other backends for namespaces and service accounts. The most specific entry counts.
    overrides: tuple[Override, ...] = ()
    #: Containers get devices and files in the Allocate response, or by the name of a CDI device.
    injection: Literal["mounts", "cdi"] = "mounts"
    cdi_dir: Path = Path("/var/run/cdi")
    #: Sockets, shared memory and HAMi-core's files of running containers; on a tmpfs.
    run_dir: Path = Path("/run/gpumgr")
    #: How long files of an ended container are kept.
    orphan_grace_seconds: Annotated[float, Meta(ge=1, le=86400)] = 60.0
    #: Consecutive samples over its memory limit after which a container is reported.
    over_limit_samples: Annotated[int, Meta(ge=1, le=3600), LIVE] = 5
    #: Memory beyond the limit that is tolerated (contexts, rounding).
    over_limit_slack_mebibytes: Annotated[int, Meta(ge=0, le=1048576), LIVE] = 256
    evict: Annotated[bool, LIVE] = False
    #: Containers may exceed their memory request, up to the annotation gpumgr.io/memory-limit.
    memory_burst: Annotated[bool, LIVE] = False
    #: 0: never. The annotation gpumgr.io/suspend-when-idle overrides it.
    suspend_when_idle_seconds: Annotated[float, Meta(ge=0, le=604800), LIVE] = 0.0
    #: How many cores above their requests the containers of a pod may get together by `gpumgr resize`.
    max_growth_cores: Annotated[int, Meta(ge=0, le=1600), LIVE] = 0
    #: The same for memory, by `gpumgr resize` and by bursts. 0: none by `gpumgr resize`, no maximum for bursts.
    max_growth_memory_mebibytes: Annotated[int, Meta(ge=0, le=16777216), LIVE] = 0


class LimiterSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: How long a container holds a GPU while others wait for it.
    quantum_milliseconds: Annotated[int, Meta(ge=10, le=30)] = 20


class MpsSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: A path, or a name in PATH (of the host).
    control_program: Annotated[str, Meta(min_length=1)] = "nvidia-cuda-mps-control"
    #: 3 is the protocol of driver r615. auto: 3 if the program supports it, else 2.
    protocol: Literal["auto", "2", "3"] = "auto"
    #: How long a GPU's MPS daemon runs after its last container.
    idle_seconds: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    #: Puts a shared GPU into EXCLUSIVE_PROCESS mode, so that no process bypasses the daemon.
    exclusive_process: bool = True


class HamiCoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: If path and checksum are None: the installed library (`gpumgr install library`, or the chart's image).
    library_path: Path | None = None
    library_sha256: Sha256 | None = None
    log_level: Annotated[int, Meta(ge=0, le=4)] = 1


class VcudaSettings(msgspec.Struct, frozen=True, kw_only=True):
    library_path: Path | None = None
    library_sha256: Sha256 | None = None
    #: Registers a container's processes. None: gpumgr's own program.
    client_path: Path | None = None
    #: The list of driver files for containers, in gpu-manager's format.
    volume_conf: Path = Path("/etc/gpu-manager/volume.conf")
    #: The first root with the loaded driver's libcuda is used.
    driver_roots: tuple[Path, ...] = (Path("/"), Path("/run/nvidia/driver"))


class CriSettings(msgspec.Struct, frozen=True, kw_only=True):
    socket: Path = Path("/run/containerd/containerd.sock")
    cgroup_root: Path = Path("/sys/fs/cgroup")


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    address: HostName = "127.0.0.1"
    #: 0: any free port.
    port: Port = 5678
    max_connections: Annotated[int, Meta(ge=8, le=65535)] = 512
    #: A bearer token for other hosts. None: they get only probes and metrics.
    token_file: Path | None = None
    #: PEM files. None: plain HTTP.
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    #: CA of clients that may read all pages (mTLS).
    client_ca_file: Path | None = None
    #: Unix socket with the same pages, for commands of root (`gpumgr usage`, `why`, `history`, `gpu`).
    socket: Path = Path("/run/gpumgr/agent.sock")


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True):
    gpu_manager_names: Annotated[bool, LIVE] = True
    hami_names: Annotated[bool, LIVE] = False


class DisplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    #: gpu-manager's gRPC service display.GPUDisplay.
    enabled: bool = True
    socket: Path = Path("/var/run/gpu-manager.sock")


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    level: Annotated[Literal["debug", "info", "warning", "error"], LIVE] = "info"
    #: auto: console on a terminal, else JSON lines.
    format: Literal["auto", "console", "json"] = "auto"


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Which of the nodes and GPUs that fit is chosen. Pods may choose another policy.
    policy: Literal["least-fragmentation", "binpack", "spread", "topology"] = "least-fragmentation"
    #: How many CPUs an average pod requests per GPU, for least-fragmentation.
    cpus_per_gpu: Annotated[float, Meta(ge=0.1, le=1000)] = 8.0
    #: The maximum number of nodes in the answer to filter. With 1 the GPUs are reserved for the pod at once.
    candidates: Annotated[int, Meta(ge=1, le=1024)] = 1
    #: How long GPUs stay assumed for a pod. Then the scheduler asks the API server about the pod, and frees the GPUs if it is not bound.
    assume_seconds: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    #: If the API server sends nothing for so long, and a list fails, too, no pod is placed. A watch lasts two thirds of this time.
    max_silence_seconds: Annotated[float, Meta(ge=15, le=600)] = 30.0
    max_request_mebibytes: Annotated[int, Meta(ge=1, le=1024)] = 128
    #: NAMESPACE/NAME. Empty: there are no quotas.
    quota_configmap: Annotated[str, Meta(pattern="^([a-z0-9.-]+/[a-z0-9.-]+)?$", max_length=317)] = "kube-system/gpuquota"
    #: Labels of nodes that quotas refer to.
    quota_model_label: Annotated[str, Meta(min_length=1, max_length=317)] = "gaia.tencent.com/gpu-model"
    quota_pool_label: Annotated[str, Meta(min_length=1, max_length=317)] = "gaia.tencent.com/gpu-pool"
    #: How long the GPUs that a preemption frees are kept for the pod that preempts.
    nomination_seconds: Annotated[float, Meta(ge=1, le=86400)] = 300.0
    #: Cluster page and /metrics, on http.address and with the access rules of the section http. 0: any free port.
    http_port: Port = 5679
    #: PEM files of the extender. None: plain HTTP, which needs --insecure-loopback.
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    #: If set, each client of filter, prioritize, preempt and bind must present a certificate.
    client_ca_file: Path | None = None
    #: Common names or DNS names. Empty: every certificate of that CA.
    client_names: tuple[str, ...] = ()
    #: True: only the replica that holds the Lease answers.
    leader_election: bool = False
    lease_name: ObjectName = "gpumgr-scheduler"
    #: None: the namespace of the pod.
    lease_namespace: ObjectName | None = None


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: The webhook adds what is missing in pods that request HAMi's resources. 0: no webhook.
    port: Port = 0
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    #: What the webhook writes as spec.schedulerName and spec.runtimeClassName (empty: nothing).
    scheduler_name: ObjectName = "gpumgr-scheduler"
    runtime_class: Annotated[str, Meta(pattern="^[a-z0-9.-]*$", max_length=253)] = ""
    #: The number of GPUs of a container that requests amounts, but no number (HAMi's defaultGPUNum).
    default_gpus: Annotated[int, Meta(ge=1, le=64)] = 1
    #: Unless it is default: the variable GPU_CORE_UTILIZATION_POLICY of the containers (HAMi's gpuCorePolicy).
    core_policy: Literal["default", "force", "disable"] = "default"
    #: Sets NVIDIA_VISIBLE_DEVICES=none in containers without a GPU request (HAMi's overwriteEnv).
    hide_gpus: bool = False


class ClaimsSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: The most ResourceClaimTemplates that `gpumgr claims` keeps: one for each different set of requests of a vcuda pod.
    max_templates_per_namespace: Annotated[int, Meta(ge=1, le=100_000)] = 256
    #: A template that no pod and no claim has used for this long is deleted.
    template_idle_hours: Annotated[float, Meta(ge=0.01, le=8760)] = 24.0
    #: /metrics and probes, on http.address and with the access rules of the section http. 0: any free port.
    http_port: Port = 5680
    #: True: only the replica that holds the Lease writes.
    leader_election: bool = False
    lease_name: ObjectName = "gpumgr-claims"
    #: None: the namespace of the pod.
    lease_namespace: ObjectName | None = None


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: How long running calls and writes may take after SIGTERM.
    stop_grace_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 5.0
    lock_path: Path = Path("/var/lib/gpumgr/agent.lock")
    #: A name that is unique among the agents of a rolling update, such as the pod's uid. A second agent with a name waits until the first
    #: agent has ended. A second agent without a name ends at once.
    instance: str | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, checked. Paths are absolute."""

    node: NodeSettings = msgspec.field(default_factory=NodeSettings)
    hami: HamiSettings = HamiSettings()
    kubelet: KubeletSettings = KubeletSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    nvml: NvmlSettings = NvmlSettings()
    placement: PlacementSettings = PlacementSettings()
    container: ContainerSettings = ContainerSettings()
    enforcement: EnforcementSettings = EnforcementSettings()
    limiter: LimiterSettings = LimiterSettings()
    mps: MpsSettings = MpsSettings()
    hami_core: HamiCoreSettings = HamiCoreSettings()
    vcuda: VcudaSettings = VcudaSettings()
    cri: CriSettings = CriSettings()
    http: HttpSettings = HttpSettings()
    metrics: MetricsSettings = MetricsSettings()
    display: DisplaySettings = DisplaySettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    webhook: WebhookSettings = WebhookSettings()
    claims: ClaimsSettings = ClaimsSettings()
    log: LogSettings = LogSettings()
    process: ProcessSettings = ProcessSettings()


@cache
def sections() -> Mapping[str, Mapping[str, Any]]:
    """Maps section -> key -> type, in the order of the file."""
    return {
        section.encode_name: {key.encode_name: key.type for key in msgspec.structs.fields(section.type)}
        for section in msgspec.structs.fields(Settings)
    }


def is_live(kind: Any) -> bool:
    return LIVE in getattr(kind, "__metadata__", ())


def flat(settings: Settings) -> Mapping[str, object]:
    """Dotted key -> value, in the file's order."""
    return {f"{section}.{key}": getattr(getattr(settings, section), key) for section, keys in sections().items() for key in keys}


def build(values: Mapping[str, object]) -> Settings:
    """Settings from converted values with dotted names ("http.port"); missing keys have their defaults."""
    made = {
        section.encode_name: section.type(
            **{key: values[name] for key in sections()[section.encode_name] if (name := f"{section.encode_name}.{key}") in values}
        )
        for section in msgspec.structs.fields(Settings)
    }
    return Settings(**made)


def plain(settings: Settings) -> dict[str, dict[str, Any]]:
    """The settings as plain types for YAML and JSON."""
    result: dict[str, dict[str, Any]] = msgspec.to_builtins(settings, enc_hook=str)
    return result


def allowed(kind: Any) -> str:
    return _allowed(inspect.type_info(kind))


def _allowed(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(type=inner, extra=extra):
            return str(extra["allowed"]) if extra and "allowed" in extra else _allowed(inner)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=low, le=high):
            return f"a whole number from {low} to {high}"
        case inspect.FloatType(ge=low, le=high):
            return f"a number from {low} to {high}"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(map(str, values))
        case inspect.VarTupleType(item_type=item):
            return f"a list, each item {_allowed(item)}"
        case inspect.UnionType(types=types):
            return " or ".join(_allowed(each) for each in types if not isinstance(each, inspect.NoneType)) + " or null"
        case inspect.CustomType():
            return "an absolute path"
    return "a text"


def missing_file(section: str, cert_file: object, key_file: object, client_ca_file: object) -> tuple[str, str] | None:
    """(setting, what to do) if a file is set that needs another file. Else None."""
    if cert_file is None and key_file is None and client_ca_file is None:
        return None
    if cert_file is None:
        named = f"{section}.tls_key_file" if key_file is not None else f"{section}.client_ca_file"
        return named, f"is set and {section}.tls_cert_file is not: name the certificate, too, or none of them for plain HTTP"
    if key_file is None:
        return (
            f"{section}.tls_cert_file",
            f"is set and {section}.tls_key_file is not: name the file with the certificate's key (it may be the same one)",
        )
    return None
