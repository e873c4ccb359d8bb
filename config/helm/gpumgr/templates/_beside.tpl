{{/* What is given beside the settings: variables and flags that go over them. */}}

{{/* The settings that the chart looks at. Given otherwise, they would go over the ConfigMap, and mounts, rights and probes not with them. */}}
{{- define "gpumgr.lookedAt" -}}
checkpoint: [dir, gpu_manager_checkpoint]
container: [allocation_dir, device_root, driver_share_dir, driver_whole_dir]
cri: [cgroup_root, socket]
display: [enabled, socket]
enforcement: [backend, cdi_dir, evict, injection, overrides, run_dir]
hami_core: [library_path, library_sha256]
http: [address, client_ca_file, port, socket, tls_cert_file, tls_key_file, token_file]
kubelet: [device_plugin_dir, pod_resources_socket]
kubernetes: [annotate_pods, delete_failed_pods, describe_node, enabled, kubeconfig, node_labels, write_events]
nvml: [library_path, load_kernel_modules]
process: [lock_path, stop_grace_seconds]
vcuda: [client_path, driver_roots, library_path, library_sha256, volume_conf]
{{- end -}}

{{- define "gpumgr.checkVariables" -}}
{{- $given := list -}}
{{- range .Values.extraEnv -}}{{- $given = append $given .name -}}{{- end -}}
{{- range $section, $keys := include "gpumgr.lookedAt" . | fromYaml -}}
{{- range $key := $keys -}}
{{- $variable := printf "GPUMGR_%s_%s" $section $key | upper -}}
{{- if has $variable $given -}}
{{- fail (printf "extraEnv: %s goes over a setting that the chart looks at; give settings.%s.%s" $variable $section $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if has "GPUMGR_NODE_NAME" $given -}}
{{- fail "extraEnv: GPUMGR_NODE_NAME would name all nodes alike; each agent has its node's name from the chart" -}}
{{- end -}}
{{- range include "gpumgr.env" . | fromYamlArray -}}
{{- if has .name $given -}}{{- fail (printf "extraEnv: %s is given by the chart; leave it out" .name) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Flags beside the chart's own: those that change nothing which the chart looks at. */}}
{{- define "gpumgr.checkArguments" -}}
{{- include "gpumgr.checkFlags" (list "extraArgs" .Values.extraArgs (list "--set" "--output" "--sim" "--sim-dir")) -}}
{{- include "gpumgr.checkFlags" (list "preflight.extraArgs" .Values.preflight.extraArgs (list "--set" "--output" "--sim" "--json")) -}}
{{- end -}}

{{/* (list name words allowed): words as the command reads them, a flag's value after "=" or as the next word. */}}
{{- define "gpumgr.checkFlags" -}}
{{- $name := index . 0 -}}
{{- $allowed := index . 2 -}}
{{- $waits := "" -}}
{{- range $word := index . 1 -}}
{{- $flag := default (splitList "=" $word | first) $waits -}}
{{- $value := $waits | empty | ternary (trimPrefix $flag $word | trimPrefix "=") $word -}}
{{- if not (has $flag $allowed) -}}
{{- $known := include "gpumgr.flags" . | fromYaml -}}
{{- $setting := get $known (regexReplaceAll "^-+" $flag "" | replace "_" "-") | default "what the agent is to know below settings" -}}
{{- fail (printf "%s: %s is none of %s; give %s" $name $word (join ", " $allowed) $setting) -}}
{{- end -}}
{{- if or $waits (contains "=" $word) (eq $flag "--json") -}}
{{- $waits = "" -}}
{{- if eq $flag "--set" -}}{{- include "gpumgr.checkAssignment" (list $name $value) -}}{{- end -}}
{{- else -}}
{{- $waits = $flag -}}
{{- end -}}
{{- end -}}
{{- if $waits -}}{{- fail (printf "%s: %s needs a value" $name $waits) -}}{{- end -}}
{{- end -}}

{{/* (list name text): what stands behind --set. */}}
{{- define "gpumgr.checkAssignment" -}}
{{- $name := index . 0 -}}
{{- $text := index . 1 -}}
{{- if not (regexMatch "^[a-z_]+\\.[a-z_0-9]+=" $text) -}}
{{- fail (printf "%s: --set %q: expected section.key=value" $name $text) -}}
{{- end -}}
{{- $setting := splitList "=" $text | first -}}
{{- if eq $setting "node.name" -}}
{{- fail (printf "%s: %s would name all nodes alike; each agent has its node's name from the chart" $name $text) -}}
{{- end -}}
{{- $pair := splitList "." $setting -}}
{{- if has (last $pair) (get (include "gpumgr.lookedAt" . | fromYaml) (first $pair) | default list) -}}
{{- fail (printf "%s: %s goes over a setting that the chart looks at; give settings.%s" $name $text $setting) -}}
{{- end -}}
{{- end -}}

{{/* Other flags of `gpumgr run`, gpu-manager's among them, with the settings that they are. */}}
{{- define "gpumgr.flags" -}}
addr: settings.display.socket
checkpoint-path: settings.checkpoint.gpu_manager_checkpoint
container-runtime-endpoint: settings.cri.socket
device-plugin-path: settings.kubelet.device_plugin_dir
extra-config: settings.container.extra_devices
hostname-override: nothing, since each agent has its node's name from the chart
kubeconfig: settings.kubernetes.kubeconfig
node-labels: settings.kubernetes.node_labels
query-addr: settings.http.address
query-port: settings.http.port
sample-period: settings.nvml.sample_period_seconds
share-mode: settings.placement.share_mode
standalone: settings.kubernetes.enabled
v: settings.log.level
virtual-manager-path: settings.container.allocation_dir
volume-config: settings.container.driver_share_dir and settings.container.driver_whole_dir
{{- end -}}
