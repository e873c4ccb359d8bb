"""Every setting: name, type, bounds, default and meaning. `config/gpumgr.yaml` documents the same; a test compares them.

The keys about the requests of HAMi's resources are in `gpumgr.settings.hami_resources`.
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

#: Bounds of nvml.unreported_memory_mebibytes. The lower one is two blocks, the least capacity in a ResourceSlice.
LEAST_UNREPORTED_MEBIBYTES: Final = 512
MOST_UNREPORTED_MEBIBYTES: Final = 1 << 24

#: Marks a setting that takes effect without a restart: it counts for later decisions, samples and writes; existing grants do not change.
#: All other settings need a restart.
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

#: The longest sample period with memory_burst: the start of a container waits for two samples, and the kubelet at most 30 s for the start.
MOST_BURST_PERIOD_SECONDS: Final = 4.0


def _this_host() -> str:
    """The host name, which is the kubelet's default too."""
    return socket.gethostname().lower()


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Name of the Node object. $NODE_NAME (set by DaemonSets) overrides the file.
    name: NodeName = msgspec.field(default_factory=_this_host)
    #: How the node offers its GPUs: by the device plugin API, or by Dynamic Resource Allocation (Kubernetes 1.36 or later).
    mode: Literal["plugin", "dra"] = "plugin"
    #: With mode plugin: the resources that are offered. tencent: tencent.com/vcuda-core and vcuda-memory. hami: nvidia.com/gpu.
    profile: Literal["tencent", "hami", "both"] = "tencent"
    #: With mode plugin: how the MIG devices of GPUs in MIG mode are offered. none: not at all. single: as nvidia.com/gpu
    #: (hami.count_resource); all GPUs must have equal MIG devices. mixed: as nvidia.com/mig-<profile>, for example mig-1g.10gb.
    mig_strategy: Literal["none", "single", "mixed"] = "none"
    #: With mode dra: the effect of the taint of a GPU that does not work. NoExecute: its pods are deleted, too.
    unhealthy_taint_effect: Literal["NoSchedule", "NoExecute"] = "NoSchedule"


class HamiSettings(ReplicaResources, frozen=True, kw_only=True):
    """Adds settings of the node to the keys of ReplicaResources, which define the resources that pods request."""

    #: How many containers may share a GPU.
    device_split_count: Annotated[int, Meta(ge=1, le=1000)] = 10
    #: mig: each container gets MIG devices, which are created for it on GPUs that support MIG; other GPUs are shared as with hami-core.
    operating_mode: Literal["hami-core", "mig"] = "hami-core"
    #: With operating_mode mig: the profiles of the MIG devices that are created, such as 1g.10gb. Empty: all profiles of the GPU.
    mig_profiles: tuple[MigProfileName, ...] = ()
    #: current: the node's GPUs are registered for HAMi's scheduler, version 2.5 or newer (annotation hami.io/node-nvidia-register).
    scheduler: Literal["current", "none"] = "current"


class KubeletSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Folder of kubelet.sock; gpumgr makes its own sockets there.
    device_plugin_dir: Path = Path("/var/lib/kubelet/device-plugins")
    #: Socket of the kubelet's PodResources API.
    pod_resources_socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    #: With node.mode dra: the folder of the kubelet's plugins, where gpumgr makes its socket.
    plugins_dir: Path = Path("/var/lib/kubelet/plugins")
    #: With node.mode dra: the folder in which the kubelet looks for registration sockets of plugins.
    plugins_registry_dir: Path = Path("/var/lib/kubelet/plugins_registry")
    #: The kubelet's topologyManagerPolicy. Unless it is none, the scheduler chooses only the node.
    topology_manager_policy: Literal["none", "best-effort", "restricted", "single-numa-node"] = "none"


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Folder of the checkpoint; on a local disk that survives restarts.
    dir: Path = Path("/var/lib/gpumgr")
    #: gpu-manager's own checkpoint: read at the first start, and when the kubelet has containers of gpu-manager that the ledger lacks. It
    #: may be missing.
    gpu_manager_checkpoint: Path = Path("/etc/gpu-manager/checkpoint/gpumanager_internal_checkpoint")

    @property
    def library_dir(self) -> Path:
        """Folder of installed libraries, which containers mount, and of compiled programs."""
        return self.dir / "lib"


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Off (`--standalone`): no API server; pods are known from the kubelet alone.
    enabled: bool = True
    #: Null: the service account of the pod that the agent runs in.
    kubeconfig: Path | None = None
    #: Delete pods that the kubelet marked Failed because gpumgr refused them.
    delete_failed_pods: bool = False
    #: How long GetPreferredAllocation may wait for a pod that the kubelet has and the agent's cache does not have yet.
    pod_wait_milliseconds: Annotated[int, Meta(ge=0, le=1000), LIVE] = 50
    #: Write each pod's allocations into its annotations.
    annotate_pods: Annotated[bool, LIVE] = True
    #: Events of pods and of the node: where a pod was placed and why, what was refused, GPUs that fail and come back.
    write_events: Annotated[bool, LIVE] = True
    #: Write labels and a condition about the GPUs to the Node object.
    describe_node: Annotated[bool, LIVE] = True
    #: Further labels of the node; the value of gaia.tencent.com/gpu-model is read from the driver.
    node_labels: Annotated[tuple[NodeLabel, ...], LIVE] = ()


class NvmlSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Null: the dynamic linker finds libnvidia-ml.so.1.
    library_path: Path | None = None
    #: A call that takes longer counts as hung.
    call_timeout_seconds: Annotated[float, Meta(ge=0.1, le=300)] = 5.0
    #: How often health and utilisation are sampled.
    sample_period_seconds: Annotated[Period, LIVE] = 1.0
    #: Run modprobe for the driver's kernel modules if NVML finds no driver.
    load_kernel_modules: bool = False
    #: XID errors that an application causes and that leave the GPU healthy.
    ignored_xids: Annotated[tuple[Xid, ...], LIVE] = (13, 31, 43, 45, 68, 109)
    #: How long the agent waits for the driver before it notifies systemd READY, with a status that says that the driver is missing.
    ready_grace_seconds: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    #: Memory of a GPU for which the driver reports none, such as GB10. Null: such a GPU is granted as a whole only.
    unreported_memory_mebibytes: Annotated[int, Meta(ge=LEAST_UNREPORTED_MEBIBYTES, le=MOST_UNREPORTED_MEBIBYTES)] | None = None
    #: The driver's program that resets a GPU; a name is looked up in PATH.
    smi_program: Annotated[str, Meta(min_length=1)] = "nvidia-smi"

    @property
    def unreported_memory_bytes(self) -> int | None:
        return None if self.unreported_memory_mebibytes is None else self.unreported_memory_mebibytes << 20


class PlacementSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: For shares: take the fullest (binpack) or the emptiest (spread) of the GPUs that fit.
    policy: Annotated[Literal["binpack", "spread"], LIVE] = "binpack"
    #: Grant shares of a GPU (less than 100 cores).
    share_mode: Annotated[bool, LIVE] = True


class ContainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Where the host's device nodes are.
    device_root: Path = Path("/dev")
    #: What adds the driver's libraries and nvidia-smi to containers. auto: the toolkit if the default runtime is NVIDIA's, else mounts.
    driver_files: Literal["auto", "toolkit", "mounts"] = "auto"
    #: The driver's files with vcuda's library instead of libcuda, for containers of the backend vcuda.
    driver_share_dir: Path = Path("/etc/gpu-manager/vdriver/nvidia")
    #: The driver's files for all other containers.
    driver_whole_dir: Path = Path("/etc/gpu-manager/vdriver/origin")
    #: One folder for each allocation is created here and mounted at /etc/vcuda.
    allocation_dir: Path = Path("/etc/gpu-manager/vm")
    #: Further device nodes for every container.
    extra_devices: tuple[Path, ...] = ()


class EnforcementSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: What enforces the limits of shares. auto: the driver's memory limits where the node has them, and gpumgr's own limiter.
    backend: Literal["auto", BackendName] = "auto"
    #: Another backend, or none, for pods of a namespace or of one of its service accounts; the most specific entry counts.
    overrides: tuple[Override, ...] = ()
    #: How containers get devices, files and environment: in the Allocate response, or by the name of a CDI device.
    injection: Literal["mounts", "cdi"] = "mounts"
    #: Folder of CDI specs; the container runtime must read it.
    cdi_dir: Path = Path("/var/run/cdi")
    #: Sockets, shared memory and region files of running containers; on a tmpfs. Keep the path short: it is part of socket paths.
    run_dir: Path = Path("/run/gpumgr")
    #: How long files of a container that is gone are kept.
    orphan_grace_seconds: Annotated[float, Meta(ge=1, le=86400)] = 60.0
    #: Number of consecutive samples over its memory limit after which a container counts as over its limit.
    over_limit_samples: Annotated[int, Meta(ge=1, le=3600), LIVE] = 5
    #: Memory beyond the limit that is tolerated (contexts, rounding).
    over_limit_slack_mebibytes: Annotated[int, Meta(ge=0, le=1048576), LIVE] = 256
    #: Evict pods with a container over its memory limit.
    evict: Annotated[bool, LIVE] = False
    #: Containers may use more memory than they request, up to their pod's annotation gpumgr.io/memory-limit, while the GPU has memory
    #: that no container was granted.
    memory_burst: Annotated[bool, LIVE] = False
    #: After how many seconds without work a container of the limiter is suspended, unless its pod's annotation
    #: gpumgr.io/suspend-when-idle has another time. 0: never.
    suspend_when_idle_seconds: Annotated[float, Meta(ge=0, le=604800), LIVE] = 0.0
    #: How many cores above their requests the containers of a pod may get together by `gpumgr resize`; 0: none.
    max_growth_cores: Annotated[int, Meta(ge=0, le=1600), LIVE] = 0
    #: How much memory above their requests the containers of a pod may have together, by `gpumgr resize` and bursts. With 0, `gpumgr
    #: resize` gives no additional memory, and bursts have no maximum.
    max_growth_memory_mebibytes: Annotated[int, Meta(ge=0, le=16777216), LIVE] = 0


class LimiterSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: How long a container holds a GPU at a time while other containers wait for it. With a longer time the GPU changes between containers
    #: less often, and each container waits longer.
    quantum_milliseconds: Annotated[int, Meta(ge=10, le=30)] = 20


class MpsSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: NVIDIA's control program: a path, or a name that the agent looks up in PATH. An agent in a pod looks for it on the host.
    control_program: Annotated[str, Meta(min_length=1)] = "nvidia-cuda-mps-control"
    #: auto: 3 if the program supports it, else 2.
    protocol: Literal["auto", "2", "3"] = "auto"
    #: How long the MPS daemon of a GPU keeps running after its last container has ended.
    idle_seconds: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    #: Put a GPU in EXCLUSIVE_PROCESS mode while it is shared, so that no process bypasses the daemon.
    exclusive_process: bool = True


class HamiCoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: libvgpu.so, built and supplied by the operator. Both null: the installed one (`gpumgr install library`, or the chart's image).
    library_path: Path | None = None
    #: Its SHA-256; another file is refused.
    library_sha256: Sha256 | None = None
    #: What the library writes to standard error: 0: errors; 1: also warnings; 3: also messages; 4: everything.
    log_level: Annotated[int, Meta(ge=0, le=4)] = 1


class VcudaSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: libcuda-control.so, built and supplied by the operator; for images with CUDA 11.2 or older.
    library_path: Path | None = None
    #: Its SHA-256; another file is refused.
    library_sha256: Sha256 | None = None
    #: The program that the library runs to register its process. Null: gpumgr's own.
    client_path: Path | None = None
    #: The list of driver files for containers, in gpu-manager's format.
    volume_conf: Path = Path("/etc/gpu-manager/volume.conf")
    #: Roots of the driver's files; the first one with the loaded driver's libcuda is used.
    driver_roots: tuple[Path, ...] = (Path("/"), Path("/run/nvidia/driver"))


class CriSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Socket of the container runtime.
    socket: Path = Path("/run/containerd/containerd.sock")
    #: Where the host's cgroup hierarchies are mounted.
    cgroup_root: Path = Path("/sys/fs/cgroup")


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: The address on which the web pages, the JSON API, /metrics and the probes are served.
    address: HostName = "127.0.0.1"
    #: 0: any free port.
    port: Port = 5678
    #: Limit of open connections; further ones are refused.
    max_connections: Annotated[int, Meta(ge=8, le=65535)] = 512
    #: A file with a bearer token, required from other hosts. Null: other hosts get only probes and metrics.
    token_file: Path | None = None
    #: Certificate in PEM: with it the pages are served over TLS. Null: plain HTTP.
    tls_cert_file: Path | None = None
    #: The certificate's key in PEM.
    tls_key_file: Path | None = None
    #: CA certificates of clients that may read all pages (mTLS); needs tls_cert_file and tls_key_file.
    client_ca_file: Path | None = None
    #: Unix socket of the same pages, and of the commands for root (`gpumgr usage`, `why`, `history`, `gpu`).
    socket: Path = Path("/run/gpumgr/agent.sock")


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Serve gpu-manager's four gauges too.
    gpu_manager_names: Annotated[bool, LIVE] = True
    #: Serve HAMi's gauges too, under their new and their old names.
    hami_names: Annotated[bool, LIVE] = False


class DisplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Serve gpu-manager's gRPC service display.GPUDisplay.
    enabled: bool = True
    #: Its unix socket.
    socket: Path = Path("/var/run/gpu-manager.sock")


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    level: Annotated[Literal["debug", "info", "warning", "error"], LIVE] = "info"
    #: auto: console on a terminal, JSON lines otherwise.
    format: Literal["auto", "console", "json"] = "auto"


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Which nodes and GPUs are chosen among all that fit: the choice that strands the fewest free cores, the fullest, the emptiest, or the
    #: GPUs with the best links. Pods may choose another policy.
    policy: Literal["least-fragmentation", "binpack", "spread", "topology"] = "least-fragmentation"
    #: How many CPUs an average pod requests for each GPU, for the policy least-fragmentation.
    cpus_per_gpu: Annotated[float, Meta(ge=0.1, le=1000)] = 8.0
    #: The maximum number of nodes in the answer to kube-scheduler's call filter. With 1 the GPUs are reserved for the pod at once.
    candidates: Annotated[int, Meta(ge=1, le=1024)] = 1
    #: GPUs stay reserved for a pod that is not bound yet for this time. Then the scheduler asks the API server; if the pod is still not
    #: bound, the GPUs are free again.
    assume_seconds: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    #: If the API server has sent nothing about nodes, pods or quotas for this long, and a list fails, too, no pod is placed. A watch lasts
    #: two thirds of this time.
    max_silence_seconds: Annotated[float, Meta(ge=15, le=600)] = 30.0
    #: Limit of the body of a request.
    max_request_mebibytes: Annotated[int, Meta(ge=1, le=1024)] = 128
    #: NAMESPACE/NAME of the ConfigMap with the quotas of namespaces. Empty: there are none.
    quota_configmap: Annotated[str, Meta(pattern="^([a-z0-9.-]+/[a-z0-9.-]+)?$", max_length=317)] = "kube-system/gpuquota"
    #: Labels of nodes that quotas refer to.
    quota_model_label: Annotated[str, Meta(min_length=1, max_length=317)] = "gaia.tencent.com/gpu-model"
    quota_pool_label: Annotated[str, Meta(min_length=1, max_length=317)] = "gaia.tencent.com/gpu-pool"
    #: How long the GPUs that preemption frees are kept for the pod that preempts.
    nomination_seconds: Annotated[float, Meta(ge=1, le=86400)] = 300.0
    #: Port of the cluster page and of /metrics, on http.address and under the access rules of the section http. 0: any free port.
    http_port: Port = 5679
    #: Certificate of the extender in PEM. Null: plain HTTP, which needs --insecure-loopback.
    tls_cert_file: Path | None = None
    #: The certificate's key in PEM.
    tls_key_file: Path | None = None
    #: CA certificates of clients. If set, each client of the verbs (filter, prioritize, preempt, bind) must present a certificate.
    client_ca_file: Path | None = None
    #: Common names or DNS names of certificates that may call the verbs. Empty: every certificate of that CA.
    client_names: tuple[str, ...] = ()
    #: True: there are several replicas, and the one that holds the Lease answers. False: this process is the only one.
    leader_election: bool = False
    #: The Lease's name.
    lease_name: ObjectName = "gpumgr-scheduler"
    #: The Lease's namespace. Null: the namespace of the pod.
    lease_namespace: ObjectName | None = None


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Port of the admission webhook, on the address of the scheduler's verbs. The webhook adds what is missing in pods that request HAMi's
    #: resources. 0: no webhook.
    port: Port = 0
    #: The webhook's certificate, and the certificate's key, in PEM.
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    #: What the webhook writes to these pods: spec.schedulerName, and spec.runtimeClassName unless it is empty.
    scheduler_name: ObjectName = "gpumgr-scheduler"
    runtime_class: Annotated[str, Meta(pattern="^[a-z0-9.-]*$", max_length=253)] = ""
    #: The GPUs of a container that requests an amount without a number of GPUs (HAMi's defaultGPUNum).
    default_gpus: Annotated[int, Meta(ge=1, le=64)] = 1
    #: Unless it is default, the webhook sets GPU_CORE_UTILIZATION_POLICY to it in these pods' containers (HAMi's gpuCorePolicy).
    core_policy: Literal["default", "force", "disable"] = "default"
    #: Set NVIDIA_VISIBLE_DEVICES=none in these pods' containers without a GPU request (as HAMi's overwriteEnv).
    hide_gpus: bool = False


class ClaimsSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: ResourceClaimTemplates that `gpumgr claims` keeps in a namespace, one for each shape of a vcuda pod.
    max_templates_per_namespace: Annotated[int, Meta(ge=1, le=100_000)] = 256
    #: A template that no pod and no claim has used for this long is deleted.
    template_idle_hours: Annotated[float, Meta(ge=0.01, le=8760)] = 24.0
    #: Port of /metrics and of the probes, on http.address and under the access rules of the section http. 0: any free port.
    http_port: Port = 5680
    #: True: there are several replicas, and the one that holds the Lease writes. False: this process is the only one.
    leader_election: bool = False
    #: The Lease's name.
    lease_name: ObjectName = "gpumgr-claims"
    #: The Lease's namespace. Null: the namespace of the pod.
    lease_namespace: ObjectName | None = None


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: After SIGTERM: how long calls and writes in progress may take to end.
    stop_grace_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 5.0
    #: The node's agent holds a lock on this file.
    lock_path: Path = Path("/var/lib/gpumgr/agent.lock")
    #: A name that is unique among the agents of a rolling update, such as the uid of the pod. If it is set, a second agent on the node
    #: starts and loads its state, and with node.mode dra it also registers the driver. It takes over when the first agent ends. None: a
    #: second agent ends at once.
    instance: str | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, checked. Paths are absolute; names end in their unit."""

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
    """section -> key -> type, in the order of the file."""
    return {
        section.encode_name: {key.encode_name: key.type for key in msgspec.structs.fields(section.type)}
        for section in msgspec.structs.fields(Settings)
    }


def is_live(kind: Any) -> bool:
    """Whether a key of this type takes effect without a restart."""
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
    """Describes the values that a key of this type allows."""
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
    """Returns the name of the setting that needs another setting, and what to do; None if no setting is missing. A file that is None is
    not set."""
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
