"""The table of log events: what each one means and what to do about it."""

from typing import Final

from tools.docs.log_calls import events
from tools.docs.markdown import code, table

#: The names of events with one meaning -> that meaning.
_ROWS: Final = {
    # the kubelet
    "stopped_at_once": "The process received a second signal and ended at once.",
    "stop_cut_short": "Running calls did not end within `process.stop_grace_seconds`.",
    "ended": "The process ended for the given reason, with the given exit code.",
    "ended_by_bug": "A bug ended the process.",
    "registration_failed": "The kubelet refused the registration or is unavailable. Retried; `error` has the remedy.",
    "registration_waits": "No device is offered yet; `reason` has the cause and the remedy. Retried.",
    "registration_lost": "The kubelet restarted, watches nothing, or the socket was removed. Retried.",
    "socket_made_again": "Another program, such as a second agent, removed or replaced a socket of the driver.",
    "claim_not_restored": "The limits or the CDI spec of a prepared claim can't be written; its containers can't start. Retried.",
    "claim_not_adopted": "The ledger was lost, and this claim was not prepared again. Its GPUs count as free: delete the pod.",
    "claims_not_adopted": (
        "The ledger was lost, and the agent may not read ResourceClaims. After mode dra, GPUs of claims may count as free: "
        "grant the right, or drain the node."
    ),
    "leaked_claims_not_examined": "The agent can't read whether these claims are still allocated. They keep their GPUs.",
    "claim_reclaimed": "The API server lacks the claim, and the kubelet its pod. Its GPUs are free again.",
    "claiming_pods_not_retried": "The annotation can't be written. The kubelet retries these pods within 90 s.",
    "two_limits": "A container uses two shares, of claims that were prepared for other pods. Only one limits it.",
    "call_failed claim_failed": "A bug in a call of the kubelet, or about a claim: the pod fails or waits.",
    # decisions
    "refused": (
        "A request was refused; `reason` is also in `kubectl describe pod`, `code` in the [table of "
        "refusals](user-guide.md#refusals)."
    ),
    "allocation_adopted": "After a loss of the checkpoint, the ledger got a container from the kubelet.",
    "allocation_not_adopted": "Kubelet and ledger contradict each other (`problem`). Delete that pod.",
    "allocation_renamed": "Ledger and kubelet named different containers for the allocation; the ledger now has the kubelet's.",
    "placement_ignored": "A pod's annotation `gpumgr.io/placement` is invalid or about another node; the agent chose its GPUs.",
    "container_suspended": "The GPU memory of a container was moved to the host's memory.",
    "container_resumed": "The memory of a suspended container is on its GPU again.",
    "suspend_failed": (
        "A container could not be suspended, and runs on; `reason` has the driver's answer. Retried after a minute or more."
    ),
    "resume_failed": "The driver could not resume a container (`reason`). Retried within a minute.",
    "suspension_failed": "A process of a suspended container can't go on. Delete its pod.",
    "resize_not_saved suspension_not_saved": (
        "The checkpoint can't be written, so no container is resized, suspended or resumed. Check the disk. Retried."
    ),
    "resize_decided": "A resize was granted or refused; `code` is the event's reason, `reason` its message.",
    "pod_resources_unavailable": "PodResources of the kubelet does not answer. Pods are identified by the order of calls.",
    "gpu_not_forgotten gpus_not_remembered name_not_remembered sweep_not_remembered": (
        "The checkpoint can't be written: names and ends of pods, new and replaced GPUs are not saved, and new GPUs not "
        "offered. Check the disk. Retried."
    ),
    # GPUs
    "gpu_not_readable": "The driver lists a GPU but can't describe it. The other GPUs are offered.",
    "gpus_not_listed": (
        "The driver lists fewer GPUs than the PCI bus (without those of virtual machines). dmesg shows why. Retried every minute."
    ),
    "gpus_given_out_twice": "Another device plugin allocates the same GPUs. Run only one; `remedy` says how.",
    "gpu_event": (
        "The driver reported an XID or a double-bit error. The GPU, or the MIG devices of `gpu_instance`, may go out of service."
    ),
    "gpu_health_changed": (
        "Only this GPU is out of service, until several good readings. `reason` `hang`: if calls about it do not return, "
        "restart the node."
    ),
    "gpu_quarantined": "Processes of an ended container still run on the GPU after 10 s. It takes no pods until they end.",
    "nvml_not_reopened": "The session with the driver could not be opened again. Retried.",
    "nvml_down": "The driver does not answer. All ids are Unhealthy, running pods go on. Retried.",
    "background_call_failed cancelled_call_failed nvml_close_failed": (
        "A call failed when the agent stopped, or after the kubelet had cancelled it. Nothing depends on it."
    ),
    "mig_device_gone": "A MIG device that a container holds was destroyed. Delete the pod.",
    "mig_device_not_destroyed": (
        "A MIG device without a container can't be destroyed, for example while it has processes. Its place stays unused. "
        "Retried."
    ),
    "mig_devices_kept": "The ledger was lost and rebuilt incompletely. Older MIG devices are not destroyed.",
    "mig_mode_not_enabled": "MIG mode can't be turned on. The GPU takes no containers. Retried.",
    "mig_devices_not_offered": "`node.mig_strategy` is `single`, and the MIG devices are not equal; `reason` has the remedy.",
    "device_node_missing": "`/dev/nvidiaN` does not exist. Run the command in the event.",
    "kernel_modules_not_loaded": "`modprobe` failed or hangs. Retried.",
    "gpu_addresses_lost": (
        "The GPUs' PCI addresses in the checkpoint can't be read. Replaced GPUs stay registered until `gpumgr gpu forget`."
    ),
    "gpu_not_reset": "`gpumgr gpu reset` failed; `reason` is the output of nvidia-smi.",
    # checkpoint and start
    "checkpoint_set_aside": (
        "The checkpoint was corrupt and is kept under `path`. The ledger is rebuilt from the kubelet (`allocation_adopted`)."
    ),
    "cordons_lost": "The checkpoint was damaged. Cordon the GPUs again.",
    "history_damaged": "Rows of the history can't be read and are skipped.",
    "history_not_saved": "The history can't be written; check the disk.",
    "kubelet_checkpoint_unreadable": "The kubelet's checkpoint can't be read. The agent uses PodResources alone.",
    "gpu_manager_checkpoint_unreadable not_taken_over": (
        "gpu-manager's checkpoint can't be read, or its records can't be saved. Retried at the next start."
    ),
    "foreign_allocations": (
        "The pods in `holders` have GPUs of gpu-manager that its checkpoint does not name. Nothing is offered. Make the "
        "checkpoint readable and restart, or delete the pods."
    ),
    "config_reloaded": "The settings file has changed; the line lists what was applied and what needs a restart.",
    "config_rejected": "The settings file is wrong (`reason`). The previous settings stay in use.",
    "node_description_left": (
        "The agent may not read the node. [Remove](operations.md#remove) labels and condition if they are left."
    ),
    # the agent's own work
    "daemon_failed": "A bug ended a part of the agent, which is restarted.",
    "background_call_takes_long": "The container runtime or a backend is slow. The agent uses the last results.",
    # limits
    "enforcement": "The backend was chosen. `gpumgr doctor` says what the others need.",
    "enforcement_finding": (
        "A container changed or bypassed its limits, or its backend does not work (`code`). Its pod has an event."
    ),
    "enforcement_not_adjusted enforcement_not_observed enforcement_not_recovered": (
        "A backend could not check, correct or take over the limits of its containers. Retried."
    ),
    "offered_ids_kept": (
        "The kubelet lost its checkpoint and offers the ids of a running pod again; no other pod gets them. Delete the pod in "
        "`holder` when its work allows it."
    ),
    "driver_files_not_removed orphan_not_removed orphans_not_listed": (
        "Files of ended containers or of an earlier driver can't be removed. Retried."
    ),
    "orphans_kept": "The mounts of processes can't be read, so files of ended containers are kept. `remedy` says what to do.",
    "container_over_limit": "A container uses more memory than it was granted. With `enforcement.evict` its pod is evicted.",
    "memory_limit_ignored": "A pod's annotation `gpumgr.io/memory-limit` is not used (`reason`). Its request is enforced.",
    "not_evicted": "The eviction of a pod over its limit could not be requested, for the given reason.",
    "gpu_process_unattributed": "For 10 s no container is charged for this process's memory.",
    "container_files_not_bounded": "Containers can fill `enforcement.run_dir` for a second ([why](enforcement.md#hami-core)).",
    "context_measured": ("What a CUDA context takes on a GPU; without `bytes` it was not measured, and counts within a second."),
    "mps_protocol_kept": "Running containers use another protocol than `mps.protocol`, which takes effect after them.",
    "mps_daemon_restarting": "The MPS daemon of a GPU has died, and its clients with it. A new one is started.",
    "mps_daemon_hangs": "The MPS daemon of a GPU does not serve new clients ([effect](enforcement.md#mps)).",
    "mps_clients_not_ended": "MPS clients of a deleted pod could not be terminated in time.",
    "mps_daemon_trouble": "The MPS daemon of a GPU does not answer correctly. Checked again.",
    "mps_daemon_does_not_quit mps_daemon_not_ended": "The MPS daemon of a GPU did not quit on request. It is killed.",
    "mps_daemon_not_checked page_failed verb_failed": (
        "A bug in a page, a verb of the extender or the check of an MPS daemon. The rest is served."
    ),
    "mps_daemons_not_resumed": "MPS is not available, and the files of running daemons can't be read. Retried.",
    "mps_limits_changed": "A process changed the limits of an MPS daemon ([effect](enforcement.md#mps)).",
    "mps_record_unreadable": "The saved record of a container or a GPU is damaged and is skipped.",
    "mps_limits_not_removed": "The MPS daemon keeps the limits of an ended container until it ends itself.",
    "registration_refused": "A process tried to register in a container that it does not belong to.",
    "device_nodes_missing": "Device nodes that every container needs are missing on the host; `error` has the remedy.",
    "driver_files": "How new containers get the driver's files (`way`), and why (`because`).",
    "driver_files_undecided": (
        "The container runtime has not reported its default runtime (`error`), so `auto` is undecided. Retried."
    ),
    "driver_files_incomplete": "Some of the driver's files are missing, so containers may lack them.",
    "driver_files_not_mirrored": "The driver's files can't be copied (`error`): new containers don't see the driver. Retried.",
    "driver_files_damaged driver_folder_set_aside": (
        "The copy of the driver's files was changed, or something else is in its place. That is kept under `kept`, and the copy "
        "made again."
    ),
    # the container runtime
    "cri_unavailable": "The container runtime does not answer; new containers can't be observed.",
    "container_not_located container_processes_unknown": (
        "The cgroup or the processes of a container can't be read, so it can't be observed."
    ),
    # the API server
    "api_server_retries": "The API server is unavailable or refuses a list or a watch. Retried; placement continues.",
    "objects_outdated": (
        "Watches and lists of this resource failed for `scheduler.max_silence_seconds` "
        "([effect](scheduler.md#when-the-api-server-is-slow-or-silent))."
    ),
    "api_object_unreadable": (
        "An object of the API server can't be read; its last readable state is used. Its event is `GpumgrCannotRead`."
    ),
    "credentials_not_renewed": "The credentials for the API server can't be read again; the previous ones stay in use.",
    "announcements_dropped announcements_wait": (
        "The API server is slow or unavailable. The latest state is written when it answers; the oldest events are dropped and "
        "counted."
    ),
    "announcement_refused": "RBAC or an admission policy forbids a write, or a refused pod is not deleted; `remedy` names a missing rule.",
    # the scheduler
    "lease_lost": "This replica did not renew the Lease in time. It answers 503 from now on.",
    "lease_not_released": "This replica ended without giving up the Lease. Another one takes it when it expires.",
    "claims_write_failed leader_election_retries": (
        "The API server refused a request. Check it and the account's rights: config/claims/rbac.yaml, "
        "config/scheduler/rbac.yaml."
    ),
    "pod_not_bound": "The pod was not bound. `reason` is also in its events; kube-scheduler tries again.",
    "waiting_pods_not_retried": (
        "The leader could not annotate its own pod: check config/scheduler/rbac.yaml. Waiting pods are tried within five minutes."
    ),
    "inventory_unusable": "A node's annotation `gpumgr.io/inventory` can't be used. `used_instead` says how the node counts.",
    "preemption_refused": "A request for preemption can't be read. No pod is evicted.",
    "quotas_unusable": "The quotas' ConfigMap can't be read. The previous quotas stay; without any, no pod is placed.",
    "placement_unusable": "A pod's annotation `gpumgr.io/placement` can't be used. The scheduler assumes likely GPUs of its node.",
    # DRA: the node's ResourceSlice
    "slice_not_published": (
        "The ResourceSlice can't be written; kube-scheduler sees the previous one. HTTP 403: the account lacks rights "
        "(chart value `mode: dra`), or its token names no node. Retried."
    ),
    "slice_fields_dropped": "The API server drops parts of the ResourceSlice; `reason` names the feature gate and the remedy.",
    "slice_not_withdrawn": (
        "The agent could not delete its ResourceSlice. Pods scheduled here within 30 s wait for a minute or longer."
    ),
    # over HTTP
    "requests_cut": (
        "Unfinished request bodies took too much memory, so the scheduler closed `count` connections. If it repeats, find the "
        "client (`last_peer`)."
    ),
    "pages_not_served": "The scheduler's page and metrics have no address (`http.address`, `scheduler.http_port`).",
    "loopback_not_served": "The port is in use on loopback: `kubectl port-forward` does not work.",
    "token_in_plain_http": "The token is sent unencrypted. Set `http.tls_cert_file`.",
    "token_unusable": "The token file can't be read or is empty. No token is accepted.",
    "certificates_unusable": "The certificates can't be read. The previous ones stay in use.",
    "connection_not_accepted": "The web server could not accept a connection, mostly because of too many open files. Retried.",
    "display_not_served": "gpu-manager's socket is in use or can't be created. Check whether gpu-manager still runs.",
}
MEANINGS: Final = {name: meaning for names, meaning in _ROWS.items() for name in names.split()}


def log_events_table() -> str:
    """The events that need an explanation, with their meaning, and their level unless it is warning. Events with one meaning and level
    are in one row. An error or a warning without a meaning has an empty cell, which a test reports."""
    rows: dict[str, list[str]] = {}
    for name, level in events().items():
        if name in MEANINGS or needs_meaning(level):
            meaning = ("" if level == "warning" else f"*{level}:* ") + MEANINGS.get(name, "")
            rows.setdefault(meaning, []).append(code(name))
    rest = "The level is warning, unless the row begins with another one. Other events of level info need "
    rest += "no action. Report bugs with the traceback in the log."
    cells = ((", ".join(names), meaning) for meaning, names in rows.items())
    return f"{table(('event', 'meaning, and what to do'), cells)}\n\n{rest}"


def needs_meaning(level: str) -> bool:
    """Whether an event of this level is documented."""
    return "error" in level or "warning" in level
