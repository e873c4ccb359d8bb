"""The table of log events: what each one means and what to do about it."""

from typing import Final

from tools.docs.log_calls import events
from tools.docs.markdown import code, table

MEANINGS: Final = {
    # the kubelet
    "starting": "The agent starts; `node` is the name of this node.",
    "ready": "The node can take pods with GPUs; `seconds` is the duration of the start. If the driver or the kubelet is "
    "unavailable, `status` says so, and the agent goes on connecting to it.",
    "stopping": "The agent received SIGTERM or SIGINT.",
    "stopped": "The agent has stopped in order.",
    "stopped_at_once": "The agent received a second signal while it was stopping, and ended at once.",
    "stop_cut_short": "Running calls or writes did not end within `process.stop_grace_seconds`. The ledger is not affected.",
    "ended": "The process ended for the given reason, with the given exit code.",
    "ended_by_bug": "A bug ended the process. Report it with the traceback.",
    "registered": "The kubelet has registered the resource, or the driver.",
    "registration_failed": "The kubelet refused the registration or is unavailable. It is retried, at once when a new "
    "kubelet.sock appears. For a driver `error` has the remedy. For the backend `vcuda`: a bug occurred while a process registered, "
    "and the process was refused.",
    "registration_waits": "No device is offered yet; `reason` has the cause and the remedy: gpu-manager still runs on this node, "
    "or has left pods with GPUs that are not known. The agent checks again every two seconds.",
    "waiting_for_other_agent": "During an update of the DaemonSet, this agent waits until the agent that `reason` names has ended. It "
    "loads all that it can in the meantime; in node.mode dra it registers the driver with sockets of its own.",
    "other_agent_ended": "The wait of `waiting_for_other_agent` has ended: this agent takes the node.",
    "registration_lost": "The kubelet has restarted or ended, or the agent's socket was removed. The agent registers again.",
    "socket_made_again": "Another program removed or replaced a socket of the driver; the agent made it again. If this repeats, find "
    "that program: a second agent?",
    "leftover_socket_removed": "A socket of the driver was left by a process that is gone.",
    "claim_prepared": "The kubelet has a ResourceClaim prepared: the claim holds these amounts, and its CDI spec is written.",
    "claim_not_restored": "After a start of the agent, or a loss of the CDI spec, the limits or the spec of a prepared claim could not be "
    "written, for the given reason. Containers that use it can't start until it can; it is tried again each second.",
    "claim_not_adopted": "The ledger was lost, and this claim of a pod on the node could not be prepared again. Its GPUs count as free: "
    "delete the pod.",
    "claims_not_adopted": "In mode plugin the ledger was lost, and the agent has no right to read ResourceClaims. If the node was in mode "
    "dra, GPUs of its claims count as free: allow it to get resourceclaims, or drain the node.",
    "leaked_claims_not_examined": "Whether these claims are still allocated could not be read; they keep their GPUs until it can.",
    "claim_reclaimed": "The claim is gone from the API server and its pod from the kubelet, which never unprepared it. Its GPUs are free "
    "again.",
    "claiming_pod_retried": "The pod waited for a claim of the driver some seconds after its binding, so the agent updated an annotation "
    "of the pod: the kubelet then prepares the claim again at once.",
    "claiming_pods_not_retried": "The annotation could not be updated. The kubelet tries the pods again within 90 s by itself.",
    "two_limits": "A container of the pod uses two shares with limits, of claims that were prepared for other pods before. It runs with "
    "one set of limits; its pod has an event.",
    "claim_failed": "A bug occurred while a claim was prepared or released, and its pod waits. Report it with the traceback.",
    "call_failed": "A bug occurred in a call of the kubelet, and the pod fails. Report it with the traceback.",
    # decisions
    "allocation_granted": "A container was granted GPUs, for the given reason. Each container has two such events, one per "
    "resource.",
    "refused": "A request was refused; `reason` is also in `kubectl describe pod`. `no_fit`: the node has the free capacity in "
    "total, but no single GPU has it. `conflict`: the kubelet chose ids that another container holds; nothing was granted twice, "
    "and the next pod of the owner can run.",
    "allocation_freed": "The kubelet no longer lists the container, so its GPUs were freed.",
    "allocation_adopted": "The kubelet lists a container that was missing in the ledger (after the checkpoint was lost); the "
    "ledger has it now.",
    "allocation_not_adopted": "The kubelet and the ledger contradict each other, as `problem` describes. Delete that pod.",
    "allocation_renamed": "The ledger had another pod or container for the allocation; it has the kubelet's now.",
    "placement_ignored": "A pod's annotation `gpumgr.io/placement` is not valid or is about another node; the agent chooses its GPUs.",
    "pod_resources_unavailable": "The kubelet's PodResources API does not answer. Requests are matched with pods by the order of "
    "the calls.",
    "name_not_remembered": "The checkpoint can't be written, so it lacks the name of a pod. The write is retried; check the free "
    "space of the disk.",
    "sweep_not_remembered": "The checkpoint can't be written, so nothing is freed. The write is retried; check the free space of "
    "the disk.",
    "gpus_not_remembered": "The checkpoint can't be written, so new GPUs are not offered. The write is retried; check the free "
    "space of the disk.",
    "failed_pod_deleted": "A refused pod was deleted (`kubernetes.delete_failed_pods`); its owner creates another one.",
    "failed_pod_not_deleted": "The API server refused to delete a refused pod, or is unavailable; the agent tries again. Check its RBAC "
    "rules.",
    # GPUs
    "gpus_found": "The driver lists these GPUs; for those in `without_events` it reports no XIDs.",
    "gpu_not_readable": "The driver lists a GPU but can't describe it. The other GPUs are offered.",
    "gpus_not_listed": "The driver lists fewer GPUs than the PCI bus has. The agent opens its session with the driver again every minute.",
    "gpus_given_out_twice": "Another device plugin on the node allocates the same GPUs. Run only one; `remedy` says how.",
    "gpus_given_out_once": "The other device plugin has ended.",
    "gpu_event": "The driver reported an XID or a double-bit error. The GPU, or the MIG devices of `gpu_instance`, may go out of service.",
    "gpu_health_changed": "The health of a GPU changed, for the given reason. Only that GPU is taken out of service; it is "
    "offered again after several good readings.",
    "gpu_quarantined": "Processes of an ended container still run on the GPU 10 s after its end. From the end of the container until they "
    "have ended, the GPU takes no pods.",
    "gpu_released": "The processes for which `gpu_quarantined` was logged have ended, and the GPU is offered again.",
    "nvml_down": "The driver does not answer. All ids are Unhealthy, running pods go on, and the agent retries.",
    "nvml_close_failed": "The driver's library could not be closed. Nothing depends on it.",
    "nvml_not_reopened": "The session with the driver could not be opened again, after `gpumgr gpu reset` or for GPUs that the "
    "driver does not list. The agent tries again.",
    "mig_device_gone": "A MIG device was destroyed that a container holds. It can't start again: delete the pod.",
    "mig_device_created": "A MIG device was created for a container (`hami.operating_mode: mig`).",
    "mig_device_destroyed": "A MIG device without a container was destroyed (`hami.operating_mode: mig`).",
    "mig_device_not_destroyed": "A MIG device without a container can't be destroyed, for the given reason, such as its processes. Its "
    "place is not used, and the agent retries.",
    "mig_devices_kept": (
        "The ledger was lost and could not be rebuilt completely. MIG devices that the agent has not created since are not destroyed."
    ),
    "mig_mode_enabled": "The agent turned the MIG mode of a GPU on (`hami.operating_mode: mig`).",
    "mig_mode_not_enabled": (
        "The MIG mode of a GPU can't be turned on, for the given reason. The GPU takes no containers; the agent retries."
    ),
    "mig_devices_not_offered": "`node.mig_strategy` is `single`, and the MIG devices are not equal; the reason says what to do.",
    "device_node_missing": "`/dev/nvidiaN` does not exist. Run the command in the event.",
    "device_node_back": "The missing device node exists again.",
    "kernel_modules_loaded": "The agent ran `modprobe` (`nvml.load_kernel_modules`).",
    "kernel_modules_not_loaded": "`modprobe` failed or hangs. The agent retries.",
    "gpu_forgotten": "A GPU that is gone is no longer registered; `reason` has the cause.",
    "gpu_not_forgotten": "The checkpoint can't be written, so a GPU that was replaced stays registered. The agent tries again.",
    "gpu_{code}": "An operator's request was carried out: `gpu_cordoned`, `gpu_draining`, `gpu_uncordoned`.",
    "gpu_addresses_lost": "The checkpoint's note of the GPUs' PCI addresses can't be read. A GPU that was replaced before stays "
    "registered until `gpumgr gpu forget`.",
    "gpu_drain_evicts": "The agent evicts a pod on a GPU that is drained with `--evict`.",
    "gpu_reset": "`gpumgr gpu reset` succeeded.",
    "gpu_not_reset": "`gpumgr gpu reset` failed; `reason` is the output of nvidia-smi.",
    # checkpoint and start
    "checkpoint_set_aside": "The checkpoint was corrupt and is kept under the name in `path`. The ledger is rebuilt from the "
    "kubelet (`allocation_adopted`).",
    "cordons_lost": "The checkpoint was damaged, and the list of cordoned GPUs was lost. Check the GPUs, and cordon them again.",
    "history_damaged": "Rows of the history can't be read and are skipped. The ledger is not affected.",
    "history_not_saved": "The history can't be written; check the disk. The ledger is not affected.",
    "reconciled_with_kubelet": "At the start, the ledger was compared with the kubelet: `adopted` allocations were added, "
    "`rejected` entries could not be.",
    "kubelet_checkpoint_unreadable": "The kubelet's checkpoint can't be read. The agent uses the PodResources API alone.",
    "gpu_manager_checkpoint_unreadable": "gpu-manager's checkpoint can't be read. The agent reads it again at the next start.",
    "taken_over_from_gpu_manager": "The records of gpu-manager's running pods were added to the ledger.",
    "foreign_allocations": "`holders` run with GPUs from gpu-manager, and its checkpoint does not say which. No device is "
    "offered, since their GPUs would be granted twice. Make the checkpoint readable for gpumgr and restart it, or delete those "
    "pods.",
    "not_taken_over": "The records of gpu-manager's pods can't be saved. The agent reads them again at the next start.",
    "flag_without_effect": "A flag of gpu-manager has no effect here, for the given reason.",
    "config_reloaded": "The settings file has changed. The event lists the keys that were applied and the ones that need a restart.",
    "config_rejected": "The settings file is wrong, as `reason` describes. The previous settings stay in use.",
    "node_description_removed": "`kubernetes.describe_node` is off (and `node_labels` is empty), so the agent removed its labels "
    "and its condition from the node.",
    "node_description_left": "The agent lacks the RBAC rules to check whether the node has its labels and condition. The "
    "commands to remove them are under **Remove**.",
    # the agent's own work
    "daemon_failed": "A bug ended a part of the agent, which is restarted. Report it with the traceback.",
    "background_call_takes_long": "The container runtime or a backend is slow. The agent uses the last results until it answers.",
    "background_call_failed": "A call that was running when the agent stopped has failed. Nothing depends on it.",
    "unheard_failure": "A call failed after its caller had stopped waiting, for example after the kubelet cancelled it.",
    # limits
    "enforcement": "The mechanism that enforces the limits was chosen, at the start or after a change. `gpumgr doctor` says what "
    "the others need.",
    "not_enforced": "No mechanism enforces the limits of a share. Its pod has an event, too.",
    "enforcement_finding": "A container changed or bypassed its limits, or its mechanism does not work (`code`). Its pod has an "
    "event.",
    "enforcement_finding_gone": "The finding no longer applies.",
    "enforcement_not_recovered": "A mechanism could not take over its state from an earlier process of the agent. The agent retries.",
    "enforcement_not_observed": "A mechanism could not check its containers. It is retried every second.",
    "enforcement_not_adjusted": "A mechanism could not correct the limits of its containers. It is retried every second.",
    "orphan_removed": "Files of an ended container were removed, after `enforcement.orphan_grace_seconds`.",
    "offered_ids_kept": "The kubelet offers the ids of an allocation again, although its pod runs or may run: the kubelet has lost its "
    "checkpoint. No other pod gets these ids. Delete the pod that `holder` names when its work allows that.",
    "orphan_not_removed": "Files of an ended container can't be removed. The agent retries.",
    "orphans_kept": "The mounts of processes can't be read, so files of containers that may have ended are kept. `remedy` says "
    "what to do.",
    "orphans_not_listed": "The files of ended containers can't be listed. The agent retries.",
    "container_over_limit": "The driver reports more memory for a container than it was granted. Its pod has an event and is "
    "counted; it is evicted only if `enforcement.evict` is on.",
    "container_within_limit": "The container is within its limit again.",
    "not_evicted": "The eviction of a pod over its limit could not be requested, for the given reason.",
    "pod_evicted": "The API server accepted the eviction of a pod.",
    "eviction_cancelled": "An eviction is no longer needed and was cancelled.",
    "gpu_stranger": "A process on a GPU belongs to no allocation. Its memory is attributed to no container. A process of an ended "
    "container is logged only if it still runs after 10 s.",
    "gpu_stranger_gone": "The unattributed process has ended.",
    "memory_limited": "The driver's own memory limit was set for a container (`nvml-memory`).",
    "gpus_oversubscribed": "`hami.device_memory_scaling` or `hami.device_core_scaling` is more than 1: containers of `nvidia.com/gpu` may "
    "together need more than a GPU has, and no backend can prevent that.",
    "hami_core_regions_not_bounded": "Regions of HAMi-core lie in plain folders: a container can take "
    "room of run_dir for a second. The reason is in the line.",
    "region_repaired": "A container changed the limits in its region. The agent has corrected them.",
    "mps_unavailable": "MPS can't be used on this node, for the given reason.",
    "mps_protocol_kept": "Running containers use another protocol than `mps.protocol`. It changes when they have ended.",
    "mps_daemon_started": "The MPS daemon of a GPU was started.",
    "mps_daemon_adopted": "The MPS daemon of a GPU was running before the restart of the agent and is used again.",
    "mps_daemon_restarting": "The MPS daemon of a GPU has died, and its clients with it. A new daemon is started for new clients.",
    "mps_daemon_stopped": "The MPS daemon of a GPU was stopped, `mps.idle_seconds` after its last container.",
    "mps_daemon_hangs": "A CUDA program that gpumgr started to try the MPS daemon of a GPU got no context in time. The containers of the "
    "daemon get a finding, new ones are refused, and the daemon is replaced when no container depends on it.",
    "mps_daemon_hangs_no_longer": "A later trial of that daemon got a context.",
    "mps_client_terminated": "A process of a deleted pod was still a client of MPS one second before the kubelet kills it; its "
    "work was terminated.",
    "mps_clients_not_ended": "Clients of MPS of a deleted pod could not be terminated before the kubelet kills them.",
    "mps_daemon_trouble": "The MPS daemon of a GPU does not answer correctly. It is checked again.",
    "mps_daemon_does_not_quit": "The MPS daemon of a GPU did not quit on request and was killed.",
    "mps_daemon_not_ended": "The MPS daemon of a GPU could not be ended. The agent retries.",
    "mps_daemon_not_checked": "A bug occurred in the check of an MPS daemon. The other daemons are checked.",
    "mps_daemons_not_resumed": "MPS is not available, and the files of running daemons can't be read. The agent retries.",
    "mps_limits_changed": "A process changed the limits of an MPS daemon over its control socket. The agent corrects them, and "
    "the containers concerned have a `tampered` finding.",
    "mps_probed": "An MPS daemon was tried on an idle GPU, with the result.",
    "mps_not_probed": "An MPS daemon could not be tried on an idle GPU. The agent retries.",
    "mps_record_unreadable": "The saved record of a container or a GPU is damaged and is skipped.",
    "mps_limits_not_removed": "The MPS daemon keeps the limits of an ended container until it ends itself.",
    "compute_mode_set": "The compute mode of a GPU was set: EXCLUSIVE_PROCESS while MPS shares it, the previous one afterwards "
    "(`mps.exclusive_process`).",
    "registration_refused": "A process tried to register in a container that it does not belong to, and was refused.",
    "device_nodes_missing": (
        "Device nodes that every container needs are missing on the host, where no container toolkit creates them. `error` has their names "
        "and the remedy."
    ),
    "driver_files": "New containers get the driver's files by `way` (`toolkit` or `mounts`); `because` has the reason. Logged at the start "
    "and after each change.",
    "driver_files_undecided": (
        "The container runtime has not answered which runtime is its default one, so it is not known whether containers need mounts of the "
        "driver's files. The agent asks again each minute. `error` has the cause."
    ),
    "driver_files_mirrored": "The driver's files were copied for containers.",
    "driver_files_incomplete": "Some of the driver's files are missing, so containers may lack them.",
    "driver_files_not_mirrored": (
        "The driver's files can't be copied, so new containers don't see the driver. The agent tries again each minute. `error` has the "
        "cause."
    ),
    "driver_files_not_removed": "Files of an earlier driver can't be removed. The agent retries.",
    "driver_files_removed": "Files of earlier drivers that no container uses were removed.",
    "driver_files_damaged": "The copy of the driver's files was changed. It is kept under `kept`, and a new copy was made.",
    "driver_folder_set_aside": "The path for the copy of the driver's files held something else, which is kept under `kept`.",
    "driver_file_skipped": "The driver lacks a file that is in `vcuda.volume_conf`.",
    # the container runtime
    "cri_available": "The container runtime answers again.",
    "cri_unavailable": "The container runtime does not answer. The agent uses its last list; new containers can't be observed yet.",
    "container_not_located": "The cgroup of a container was not found, so the container can't be observed.",
    "container_processes_unknown": "The processes of a container can't be read.",
    # the API server
    "api_server_retries": "The API server is unavailable or refuses the list or the watch, which is retried. Placement does not "
    "wait for it.",
    "objects_outdated": "The API server has sent nothing about this resource for `scheduler.max_silence_seconds`, and a list failed, too. "
    "The scheduler places no pod, `gpumgr claims` writes nothing, and `/readyz` is 503 until it answers.",
    "objects_current_again": "The API server has answered again after `objects_outdated`.",
    "api_object_unreadable": "An object of the API server can't be read; its last readable state stays in use. It is logged once, and gets "
    "the event `GpumgrCannotRead`.",
    "credentials_not_renewed": "The credentials for the API server can't be read again. The previous ones stay in use until a later read.",
    "announcements_wait": "The API server is unavailable. The latest state is written when it answers again.",
    "announcements_go_on": "The API server answers again.",
    "announcement_refused": "RBAC or an admission policy forbids a write. `remedy` names the rule that is needed.",
    "announcements_dropped": "Events arise faster than the API server accepts them. The oldest are dropped and counted.",
    "announcements_left": "The agent stopped before everything was published. Labels and annotations are written at the next "
    "start.",
    # the scheduler
    "scheduler_listening": "`gpumgr scheduler` serves kube-scheduler at this address.",
    "webhook_listening": "`gpumgr scheduler` completes pods with HAMi's resources at this address.",
    "lease_taken": "This replica holds the Lease. It answers after `leading`.",
    "leading": "This replica has read everything after it took the Lease. It answers kube-scheduler; as `gpumgr claims` it writes.",
    "lease_lost": "This replica did not renew the Lease in time, or another replica holds it. The scheduler answers 503 from now on.",
    "lease_released": "This replica ends and has given up the Lease; another one takes it at once.",
    "lease_not_released": "This replica ends and could not give up the Lease. Another one takes it when it has expired.",
    "leader_election_retries": "A request for the Lease or for the leader's label failed, and is repeated. Check the rights "
    "(config/scheduler/rbac.yaml) and the API server.",
    "pod_bound": "The pod was bound to its node. Its annotation `gpumgr.io/placement` names the GPUs.",
    "pod_not_bound": "The pod was not bound. kube-scheduler shows `reason` in the pod's events and tries again.",
    "waiting_pods_retried": "`pod` fits by now and kube-scheduler had not tried it again, so the leader updated an annotation of its "
    "own pod: at this event kube-scheduler tries all waiting pods.",
    "waiting_pods_not_retried": "The leader could not update the annotation of its own pod. Waiting pods are tried at the next event of "
    "the cluster, or within five minutes. Check the right to patch pods in the scheduler's namespace (config/scheduler/rbac.yaml).",
    "assumption_ended": "The API server shows that a pod was not bound within `scheduler.assume_seconds`, or has ended. Its GPUs are free "
    "for other pods again.",
    "inventory_unusable": "A node's annotation `gpumgr.io/inventory` can't be used. `used_instead` says how the node counts until it can.",
    "preemption": "kube-scheduler was given pods of one node to evict. The GPUs that they free are kept for the pod that preempts.",
    "preemption_refused": "A request for preemption can't be read. No pod is evicted.",
    "quotas_changed": "The quotas of the ConfigMap are used from now on, for this number of namespaces; 0: there are none.",
    "quotas_unusable": "The ConfigMap with the quotas can't be read. The quotas before stay; if there are none, no pod is placed.",
    "placement_unusable": "A pod's annotation `gpumgr.io/placement` can't be used. The scheduler assumes likely GPUs of its node.",
    "verb_failed": "A bug occurred in a verb of the extender. kube-scheduler tries again. Report it with the traceback.",
    # DRA: the node's ResourceSlice
    "slice_published": "The ResourceSlice of this node was written with this number of devices.",
    "slice_deleted": "The ResourceSlice was deleted: a starting kubelet does that, and any operator may. It is written again.",
    "slice_not_published": "The ResourceSlice can't be written, for the given reason, and kube-scheduler does not see the node's GPUs, or "
    "their previous state. It is tried again. HTTP 403: the agent's account lacks rights (chart value `mode: dra`), or its token names "
    "no node. HTTP 422: report the API server's sentence.",
    "slice_not_looked_up": "Whether the ResourceSlice still exists after a new list of the API server is not known, for the given reason: "
    "agents need the right to get ResourceSlices. It counts as published, and is looked up again every 10 s.",
    "slice_fields_dropped": "The API server does not store parts of the ResourceSlice; `reason` names the feature gate, and what to do.",
    "slice_withdrawn": "The agent stops in order and has deleted its ResourceSlice, so that no further pods are scheduled to it.",
    "slice_not_withdrawn": "The agent stopped, or started in mode plugin, and could not delete its ResourceSlice. Pods that "
    "are scheduled to the node before the kubelet deletes the slice, 30 s later, wait for a minute or longer.",
    # the claims controller
    "template_created": "`gpumgr claims` created the ResourceClaimTemplate that a pod names.",
    "template_deleted": "No pod and no claim had used this ResourceClaimTemplate for `claims.template_idle_hours`.",
    "gate_removed": "The quota of its namespace allows this pod, so `gpumgr claims` removed its scheduling gate.",
    "claims_write_failed": "The API server refused a request of `gpumgr claims`, or did not answer. Check the rights "
    "(config/claims/rbac.yaml) and the API server.",
    # over HTTP
    "pages_not_served": "The scheduler's page and metrics have no address (`http.address`, `scheduler.http_port`); pods are scheduled.",
    "web_listening": "The page and the metrics are served at this address.",
    "loopback_not_served": "The port is in use on the loopback address, so `kubectl port-forward` does not work.",
    "token_in_plain_http": "The token is sent unencrypted over the network. Set `http.tls_cert_file`.",
    "token_read_again": "The token file has changed and was read again.",
    "token_unusable": "The token file can't be read or is empty. No token is accepted until it is correct.",
    "certificates_read_again": "The certificates have changed and were read again.",
    "certificates_unusable": "The certificates can't be read. The previous ones stay in use.",
    "page_failed": "A bug occurred in a page; the others are served. Report it with the traceback.",
    "connection_not_accepted": "A connection to the web server could not be accepted, in most cases since the process has too many "
    "files open. The server tries again after a second.",
    "display_not_served": "gpu-manager's socket is in use or can't be created. Check whether gpu-manager still runs.",
}


def log_events_table() -> str:
    """All events by name. An event without a meaning has an empty cell, which a test reports."""
    rows = ((code(name), level, MEANINGS.get(name, "")) for name, level in events().items())
    return table(("event", "level", "meaning, and what to do"), rows)
