"""Every event of the log, with what it means and what to do about it."""

from typing import Final

from tests.docs.log_calls import events
from tests.docs.markdown import code, table

MEANINGS: Final = {
    # the kubelet
    "starting": "the agent begins, with these settings' node name",
    "ready": "the node takes pods; how long the start took. Without driver or kubelet it says so, and goes on looking for them",
    "stopping": "SIGTERM or SIGINT came",
    "stopped": "all ended in order",
    "stopped_at_once": "a second signal came while it was stopping",
    "stop_cut_short": "calls or writes under way did not end within `process.stop_grace_seconds`; the ledger is not concerned",
    "ended": "why the process ended, with its exit code",
    "ended_by_bug": "a bug ended the process; the traceback says where",
    "registered": "the kubelet takes the resource from us",
    "registration_failed": "the kubelet said no or is away (retried in place, at once when its socket is new); "
    "of the backend `vcuda`: a bug while a process registered, which is refused",
    "registration_waits": "nothing is offered yet; `reason` says why, and what to do: gpu-manager still answers on this node, or has left "
    "pods whose GPUs are not known. Looked at again every two seconds",
    "registration_lost": "the kubelet restarted or is gone, or our socket is; registered again in place",
    "call_failed": "a bug in a call of the kubelet's; the traceback says where, the pod fails",
    # decisions
    "allocation_granted": "who was given what and why; a container has two such lines, one for each resource",
    "refused": "`reason` stands in `kubectl describe pod` too. `no_fit`: the node's sum had room, no single GPU had. `conflict`: the "
    "kubelet handed out ids that somebody holds; nothing was given twice, the owner's next pod runs",
    "allocation_freed": "its holder is gone, as the kubelet has it",
    "allocation_adopted": "the kubelet knows a holder that the ledger lacked (a lost checkpoint); taken into the ledger",
    "allocation_not_adopted": "the kubelet and the ledger differ in a way that can't be mended: `problem` says how. End that pod",
    "allocation_renamed": "the ledger had another pod's name for it; the kubelet's counts",
    "pod_resources_unavailable": "the kubelet does not say whose request it is; placement goes on by the order of calls",
    "name_not_remembered": "the checkpoint can't be written: a pod's name is missing in it until it can. Is the disk full?",
    "sweep_not_remembered": "the checkpoint can't be written: nothing is freed until it can. Is the disk full?",
    "gpus_not_remembered": "the checkpoint can't be written: GPUs that are new here are not offered. Is the disk full?",
    "failed_pod_deleted": "a pod that was refused, with `kubernetes.delete_failed_pods`; its owner makes another",
    "failed_pod_not_deleted": "the API server refuses that, or is away",
    # GPUs
    "gpus_found": "what the driver shows; `without_events`: GPUs of which no XIDs are told",
    "gpu_not_readable": "the driver lists a GPU but can't tell about it; the others are offered",
    "gpus_given_out_twice": "another device plugin on the node hands out the same GPUs: run one; `remedy` says how",
    "gpus_given_out_once": "it is gone",
    "gpu_event": "an XID, which may take the GPU out",
    "gpu_health_changed": "how the GPU is now and why; that GPU alone is taken out, and comes back after good looks",
    "gpu_quarantined": "processes of an ended container still run on the GPU; it is offered again when they are gone",
    "gpu_released": "they are gone",
    "nvml_down": "the driver does not answer; ids turn Unhealthy, pods go on running, retried",
    "nvml_close_failed": "the driver's library did not take its leave; nothing depends on it",
    "nvml_not_reopened": "after `gpumgr gpu reset` the driver did not answer; retried",
    "device_node_missing": "`/dev/nvidiaN` is not there; the line says which command makes it",
    "device_node_back": "it is there again",
    "kernel_modules_loaded": "`modprobe` was run (`nvml.load_kernel_modules`)",
    "kernel_modules_not_loaded": "`modprobe` failed or hangs; tried again",
    "gpu_{code}": "an operator's order: `gpu_cordoned`, `gpu_draining`, `gpu_uncordoned`",
    "gpu_drain_evicts": "a pod on a GPU that is drained with `--evict`",
    "gpu_reset": "`gpumgr gpu reset` succeeded",
    "gpu_not_reset": "it failed; `reason` is what nvidia-smi said",
    # checkpoint and start
    "checkpoint_set_aside": "the file was corrupt and is kept under the name in `path`; the ledger comes from the kubelet "
    "(`allocation_adopted`)",
    "cordons_lost": "the checkpoint was damaged, and with it the list of cordoned GPUs: look, and cordon them again",
    "history_damaged": "rows of the history can't be read and are left out; the ledger is not concerned",
    "history_not_saved": "the disk is full or broken; the ledger is not concerned",
    "reconciled_with_kubelet": "at the start: how many allocations the kubelet's view added, and how many of its entries could not be",
    "kubelet_checkpoint_unreadable": "the kubelet's own file can't be read; PodResources alone must do",
    "gpu_manager_checkpoint_unreadable": "gpu-manager's file can't be read; it is read again at the next start",
    "taken_over_from_gpu_manager": "its records were taken into the ledger, once",
    "foreign_allocations": "`holders` run with GPUs from gpu-manager, and its checkpoint does not tell which: nothing is offered, or they "
    "would be given out again. `remedy`: let gpumgr see the file and restart it, or end those pods",
    "not_taken_over": "what was read of gpu-manager can't be kept; it is read again at the next start",
    "flag_without_effect": "a flag of gpu-manager's that means nothing here, and why",
    "config_reloaded": "the settings file changed: what was applied, what needs a restart",
    "config_rejected": "the settings file is wrong, `reason` says where; the settings of before hold",
    "node_description_removed": "`kubernetes.describe_node` is off (and `node_labels` empty): what stood on the node is taken away",
    "node_description_left": "it can't be looked for without rights; the commands are under **Remove**",
    # the agent's own work
    "daemon_retries": "a part of the agent met trouble from outside and tries again; `error` says what",
    "daemon_failed": "a bug in a part that the agent can do without for a while; it begins anew, the traceback says where",
    "errand_takes_long": "somebody outside (mostly the container runtime) is slow; what was known counts meanwhile",
    "errand_failed": "what was under way at the end failed; nothing depends on it",
    "unheard_failure": "what nobody waits for any more failed, such as a call that the kubelet gave up",
    # limits
    "enforcement": "which mechanism keeps shares within their limits, at start and when that changes; `gpumgr doctor` says what the "
    "others lack",
    "not_enforced": "a share that nothing keeps; its pod's event says so too",
    "enforcement_finding": "a container tampered with its limits, got past them, or its mechanism broke (`code`); its pod has an event",
    "enforcement_finding_gone": "it is well again",
    "enforcement_not_{what}": "a mechanism could not be `recovered`, `observed` or `adjusted`; tried again",
    "orphan_removed": "files of a container that is gone, after `enforcement.orphan_grace_seconds`",
    "orphan_not_removed": "they can't be removed; tried again",
    "orphans_kept": "the host's processes can't be looked at, so files of containers that may be gone stay; `remedy` says what to do",
    "orphans_not_looked_for": "a mechanism can't tell what it has left; tried again",
    "container_over_limit": "the driver counts more memory for a container than it was granted; event and metric, eviction only if "
    "`enforcement.evict` is on",
    "container_within_limit": "it is within its limit again",
    "not_evicted": "an offender's eviction could not be asked for, and why",
    "pod_evicted": "the API server took the eviction",
    "eviction_cancelled": "the reasons for it are gone",
    "gpu_stranger": "a process on a GPU that belongs to no allocation; its memory is in nobody's account",
    "gpu_stranger_gone": "it is gone",
    "memory_limited": "the driver's own memory limit was set (`nvml-memory`)",
    "hami_core_not_looked_at": "containers' regions can't be read; tried again",
    "region_repaired": "a container changed limits in its region; they are put right",
    "mps_unavailable": "why MPS can't be used on this node",
    "mps_protocol_kept": "running containers use another protocol than `mps.protocol` asks; it changes when they are gone",
    "mps_daemon_started": "a GPU's MPS daemon runs",
    "mps_daemon_adopted": "one from before the agent's restart goes on",
    "mps_daemon_restarting": "a GPU's MPS daemon had died; its clients died with it, new ones find the new daemon",
    "mps_daemon_stopped": "it ended, `mps.idle_seconds` after its last container",
    "mps_daemon_trouble": "it does not answer as it should; looked at again",
    "mps_daemon_does_not_quit": "it was killed, since it did not end when asked",
    "mps_daemon_not_ended": "it could not be ended; tried again",
    "mps_daemon_not_tended": "a bug while a daemon was looked after; the others are looked after",
    "mps_daemons_not_looked_after": "a look at the daemons failed; tried again",
    "mps_limits_changed": "somebody loosened a daemon's bounds over its control socket; they are put right, the GPU's containers have a "
    "`tampered` finding",
    "mps_record_unreadable": "what was kept of a container or a GPU is damaged; it is left out",
    "mps_tenant_not_dismissed": "a container that is gone still has its place at the daemon; tried again",
    "compute_mode_set": "EXCLUSIVE_PROCESS while a GPU is shared by MPS, and back (`mps.exclusive_process`)",
    "vcuda_not_kept": "limits of a container can't be kept, and why",
    "vcuda_not_looked_at": "containers' files can't be read; tried again",
    "registration_refused": "a process asked to register where it does not belong",
    "registration_names_differ": "a process calls itself otherwise than the kernel does; the kernel counts",
    "driver_files_mirrored": "the driver's files were laid out for containers",
    "driver_files_incomplete": "some are missing, which containers may miss too",
    "driver_files_not_mirrored": "the backend `vcuda` can't be used; `error` says why",
    "driver_files_not_removed": "files of an earlier driver can't be removed; tried again",
    "driver_files_removed": "files of earlier drivers that nobody uses any more",
    "driver_files_damaged": "a mirror was not as it was made; kept under `kept`, and made anew",
    "driver_folder_set_aside": "something else was where the mirror belongs; kept under `kept`",
    "driver_file_skipped": "a file of `vcuda.volume_conf` that this driver lacks",
    # the container runtime
    "cri_available": "it answers",
    "cri_unavailable": "the container runtime does not answer: what was known counts, new containers can't be watched yet",
    "container_not_located": "its cgroup is not found: it can't be watched",
    "container_processes_unknown": "its processes can't be read",
    # the API server
    "api_server_retries": "it is away or says no; placement goes on by what is known, nothing waits for it",
    "api_object_unreadable": "a pod can't be understood and is left out",
    "credentials_not_renewed": "the token file can't be read; the earlier one stays in use",
    "announcements_wait": "the API server is away; the latest state is written when it is back",
    "announcements_go_on": "it is back",
    "announcement_refused": "RBAC or an admission policy forbids: `remedy` names the rule",
    "announcements_dropped": "more is said than the API server takes; the oldest events are left out, and counted",
    # over HTTP
    "web_listening": "where the page and the metrics are",
    "loopback_not_served": "the port is taken there; `kubectl port-forward` won't work",
    "token_in_plain_http": "a token goes over the network in the clear: set `http.tls_cert_file`",
    "token_read_again": "the token file changed",
    "token_unusable": "the token file can't be read or is empty: no token is taken until it is right",
    "certificates_read_again": "the certificates changed",
    "certificates_unusable": "they can't be read; the earlier ones stay in use",
    "page_failed": "a bug in a page; the others are served",
    "accept_failed": "a connection was lost before it began",
    "accept_paused": "no file descriptors are left; tried again shortly",
    "display_not_served": "gpu-manager's socket is taken (does gpu-manager still run?), or can't be made",
}


def log_events_table() -> str:
    """All, by name; one without a meaning has an empty cell, which a test finds."""
    rows = ((code(name), level, MEANINGS.get(name, "")) for name, level in events().items())
    return table(("event", "level", "meaning, and what to do"), rows)
