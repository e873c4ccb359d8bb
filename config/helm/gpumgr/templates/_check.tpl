{{/* What can't work, or not together, each with a sentence. */}}
{{- define "gpumgr.check" -}}
{{- include "gpumgr.checkRights" . -}}
{{- include "gpumgr.checkWeb" . -}}
{{- include "gpumgr.checkMetrics" . -}}
{{- include "gpumgr.checkSockets" . -}}
{{- include "gpumgr.checkFolders" . -}}
{{- include "gpumgr.checkVariables" . -}}
{{- include "gpumgr.checkExtras" . -}}
{{- end -}}

{{- define "gpumgr.checkRights" -}}
{{- $values := .Values -}}
{{- if and (include "gpumgr.namesMps" .) (not $values.mps.enabled) -}}
{{- fail "settings.enforcement names mps: set mps.enabled too, which lets its daemons outlive the agent's pod" -}}
{{- end -}}
{{- if and $values.mps.enabled (not $values.privileged) -}}
{{- fail "mps.enabled needs privileged: true: the daemons are made units of the host's systemd, and who may do that may do everything" -}}
{{- end -}}
{{- if $values.driver.root -}}
{{- if not $values.privileged -}}
{{- fail "driver.root needs privileged: true: without it only the NVIDIA container runtime can give the agent the GPUs' devices" -}}
{{- end -}}
{{- if not (hasPrefix "/driver-root/" (include "gpumgr.setting" (list . "nvml" "library_path"))) -}}
{{- fail "driver.root needs settings.nvml.library_path: the full path of libnvidia-ml.so.1 below /driver-root" -}}
{{- end -}}
{{- end -}}
{{- if eq (include "gpumgr.setting" (list . "nvml" "load_kernel_modules")) "true" -}}
{{- fail "settings.nvml.load_kernel_modules: there is no modprobe in the image; load the driver's modules on the host, by systemd-modules-load or as the driver's package does it" -}}
{{- end -}}
{{- $devices := default "/dev" (include "gpumgr.setting" (list . "container" "device_root")) | clean -}}
{{- if and (ne "/dev" $devices) (not (include "gpumgr.broughtBy" (list .Values.extraVolumeMounts $devices))) -}}
{{- fail (printf "settings.container.device_root: nothing is mounted at %s; leave the key out for /dev, or bring the folder by extraVolumes and extraVolumeMounts" $devices) -}}
{{- end -}}
{{- end -}}

{{/* "yes" if one of these mounts has the path. */}}
{{- define "gpumgr.broughtBy" -}}
{{- $path := printf "%s/" (index . 1 | clean) -}}
{{- $there := dict -}}
{{- range default list (index . 0) -}}
{{- if hasPrefix (printf "%s/" (clean .mountPath)) $path -}}{{- $_ := set $there "yes" true -}}{{- end -}}
{{- end -}}
{{- if $there -}}yes{{- end -}}
{{- end -}}

{{- define "gpumgr.checkWeb" -}}
{{- if and (include "gpumgr.loopback" .) (not .Values.hostNetwork) -}}
{{- fail (printf "settings.http.address: the kubelet's probes don't reach %s in the pod; leave the key out for the pod's address, or set hostNetwork" (include "gpumgr.setting" (list . "http" "address"))) -}}
{{- end -}}
{{- $kubeconfig := include "gpumgr.setting" (list . "kubernetes" "kubeconfig") -}}
{{- if and $kubeconfig (dig "kubernetes" "enabled" true .Values.settings) -}}
{{- $mounts := concat (include "gpumgr.hostMounts" . | fromYamlArray) (default list .Values.extraVolumeMounts) -}}
{{- if not (include "gpumgr.broughtBy" (list $mounts $kubeconfig)) -}}
{{- fail (printf "settings.kubernetes.kubeconfig: nothing is mounted where %s is; bring the file by extraVolumes and extraVolumeMounts" $kubeconfig) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gpumgr.checkMetrics" -}}
{{- $metrics := .Values.metrics -}}
{{- if and $metrics.podMonitor.enabled $metrics.serviceMonitor.enabled -}}
{{- fail "metrics.podMonitor and metrics.serviceMonitor: enable one of them, or everything is scraped twice" -}}
{{- end -}}
{{- if and $metrics.serviceMonitor.enabled (not $metrics.service.enabled) -}}
{{- fail "metrics.serviceMonitor needs metrics.service.enabled: true; metrics.podMonitor does without" -}}
{{- end -}}
{{- if eq (default "" $metrics.service.alias) (printf "%s-metrics" (include "gpumgr.fullname" .)) -}}
{{- fail (printf "metrics.service.alias: the first Service is named %s already; give another name, or none" $metrics.service.alias) -}}
{{- end -}}
{{- end -}}

{{/* What others on the host open, or what must be there after the pod, lies where the host has it. */}}
{{- define "gpumgr.checkSockets" -}}
{{- $folders := list (include "gpumgr.path" (list . "enforcement" "run_dir")) (include "gpumgr.path" (list . "checkpoint" "dir")) -}}
{{- range $key := list (list "http" "socket") (list "display" "socket") (list "process" "lock_path") -}}
{{- $path := include "gpumgr.path" (list $ (index $key 0) (index $key 1)) -}}
{{- $kept := dict -}}
{{- range $folders -}}{{- if hasPrefix (printf "%s/" .) $path -}}{{- $_ := set $kept "yes" true -}}{{- end -}}{{- end -}}
{{- if not (or $kept (include "gpumgr.broughtBy" (list $.Values.extraVolumeMounts $path))) -}}
{{- fail (printf "settings.%s.%s: %s must lie in %s: those are mounted from the host" (index $key 0) (index $key 1) $path (join " or " $folders)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* No folder of the host may hide what the image and the pod bring: the agent would not start. */}}
{{- define "gpumgr.checkFolders" -}}
{{- $own := list "/opt/gpumgr" "/usr/bin" "/usr/lib" "/usr/lib64" "/bin" "/sbin" "/lib" "/lib64" "/proc" "/sys" "/dev" -}}
{{- $own = concat $own (list "/usr/lib/x86_64-linux-gnu" "/usr/lib/aarch64-linux-gnu" "/lib/x86_64-linux-gnu" "/lib/aarch64-linux-gnu") -}}
{{- $own = concat $own (list "/etc/gpumgr" "/etc/gpumgr-token" "/etc/gpumgr-tls" "/tmp" "/driver-root") -}}
{{- if include "gpumgr.usesAccount" . -}}
{{- $own = concat $own (list "/run/secrets" "/var/run/secrets") -}}
{{- end -}}
{{- range $folder := include "gpumgr.hostPaths" . | fromYamlArray -}}
{{- if not $folder.at -}}
{{- range $own -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" $folder.path)) (printf "%s/" .) -}}
{{- fail (printf "settings.%s: all of the host's %s would be mounted, over the pod's own %s; let it lie in another folder" $folder.setting $folder.path .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The settings that the chart looks at. Given otherwise, they would go over the ConfigMap, and mounts, rights and probes not with them. */}}
{{- define "gpumgr.lookedAt" -}}
checkpoint: [dir, gpu_manager_checkpoint]
container: [allocation_dir, device_root, driver_share_dir, driver_whole_dir]
cri: [cgroup_root, socket]
display: [socket]
enforcement: [backend, cdi_dir, evict, injection, overrides, run_dir]
hami_core: [library_path]
http: [address, client_ca_file, port, socket, tls_cert_file, tls_key_file, token_file]
kubelet: [device_plugin_dir, pod_resources_socket]
kubernetes: [annotate_pods, delete_failed_pods, describe_node, enabled, kubeconfig, node_labels, write_events]
nvml: [library_path, load_kernel_modules]
process: [lock_path, stop_grace_seconds]
vcuda: [driver_roots, library_path]
{{- end -}}

{{- define "gpumgr.checkVariables" -}}
{{- $given := list -}}
{{- range .Values.extraEnv -}}{{- $given = append $given .name -}}{{- end -}}
{{- $arguments := concat (default list .Values.extraArgs) (default list .Values.preflight.extraArgs) -}}
{{- range $section, $keys := include "gpumgr.lookedAt" . | fromYaml -}}
{{- range $key := $keys -}}
{{- $variable := printf "GPUMGR_%s_%s" $section $key | upper -}}
{{- if has $variable $given -}}
{{- fail (printf "extraEnv: %s goes over a setting that the chart looks at; give settings.%s.%s" $variable $section $key) -}}
{{- end -}}
{{- range $arguments -}}
{{- if hasPrefix (printf "%s.%s=" $section $key) (trimPrefix "--set=" .) -}}
{{- fail (printf "extraArgs: %s goes over a setting that the chart looks at; give settings.%s.%s" . $section $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range include "gpumgr.env" . | fromYamlArray -}}
{{- if has .name $given -}}{{- fail (printf "extraEnv: %s is given by the chart; leave it out" .name) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* What is added goes beside the chart's own and not over it. */}}
{{- define "gpumgr.checkExtras" -}}
{{- $own := include "gpumgr.podLabels" . | fromYaml -}}
{{- range $label, $_ := .Values.podLabels -}}
{{- if hasKey $own $label -}}{{- fail (printf "podLabels: %s is given by the chart, which finds its pods by it; leave it out" $label) -}}{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- $places := list -}}
{{- range include "gpumgr.mounts" . | fromYamlArray -}}
{{- $names = append $names .name -}}
{{- $places = append $places .mountPath -}}
{{- end -}}
{{- range .Values.extraVolumes -}}
{{- if has .name $names -}}{{- fail (printf "extraVolumes: the chart has a volume %s already; take another name" .name) -}}{{- end -}}
{{- end -}}
{{- range .Values.extraVolumeMounts -}}
{{- if has (clean .mountPath) $places -}}
{{- fail (printf "extraVolumeMounts: the chart mounts something at %s already; take another place, or change the setting that names it" (clean .mountPath)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
