{{/* Variables and flags that override the settings. */}}

{{/* The settings that the chart evaluates. Given elsewhere they would override the ConfigMap, but mounts, rights and probes would not follow. */}}
{{- define "gpumgr.lookedAt" -}}
checkpoint: [dir, gpu_manager_checkpoint]
container: [allocation_dir, device_root, driver_files, driver_share_dir, driver_whole_dir]
cri: [cgroup_root, socket]
display: [enabled, socket]
enforcement: [backend, cdi_dir, evict, injection, overrides, run_dir]
hami: [core_resource, count_resource, memory_percentage_resource, memory_resource, operating_mode, priority_resource]
hami_core: [library_path, library_sha256]
http: [address, client_ca_file, port, socket, tls_cert_file, tls_key_file, token_file]
kubelet: [device_plugin_dir, plugins_dir, plugins_registry_dir, pod_resources_socket]
kubernetes: [annotate_pods, delete_failed_pods, describe_node, enabled, kubeconfig, node_labels, write_events]
node: [mode, profile]
nvml: [library_path, load_kernel_modules]
process: [lock_path, stop_grace_seconds]
claims: [http_port, leader_election, lease_name, lease_namespace]
scheduler: [client_ca_file, client_names, http_port, leader_election, lease_name, quota_configmap, tls_cert_file, tls_key_file]
vcuda: [client_path, driver_roots, library_path, library_sha256, volume_conf]
webhook: [core_policy, default_gpus, hide_gpus, port, runtime_class, scheduler_name, tls_cert_file, tls_key_file]
{{- end -}}

{{- define "gpumgr.checkVariables" -}}
{{- $given := list -}}
{{- range concat (default list .Values.extraEnv) (default list .Values.scheduler.extraEnv) (default list .Values.claims.extraEnv) -}}{{- $given = append $given .name -}}{{- end -}}
{{- range $section, $keys := include "gpumgr.lookedAt" . | fromYaml -}}
{{- range $key := $keys -}}
{{- $variable := printf "GPUMGR_%s_%s" $section $key | upper -}}
{{- if has $variable $given -}}
{{- fail (printf "extraEnv: %s goes over a setting that the chart looks at; give settings.%s.%s" $variable $section $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if and (eq .name "GPUMGR_NODE_NAME") (not (dig "fieldRef" "" (default dict .valueFrom))) -}}
{{- fail "extraEnv: GPUMGR_NODE_NAME would name all nodes alike; each agent has its node's name from the chart" -}}
{{- end -}}
{{- end -}}
{{- range include "gpumgr.env" . | fromYamlArray -}}
{{- if has .name $given -}}{{- fail (printf "extraEnv: %s is given by the chart; leave it out" .name) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Further flags: those that change nothing that the chart evaluates. `gpumgr doctor` has none of gpu-manager's flags. */}}
{{- define "gpumgr.checkArguments" -}}
{{- $flags := include "gpumgr.flags" . | fromYaml -}}
{{- include "gpumgr.checkFlags" (list "extraArgs" .Values.extraArgs (list "--set" "--output" "--sim" "--sim-dir") $flags) -}}
{{- include "gpumgr.checkFlags" (list "preflight.extraArgs" .Values.preflight.extraArgs (list "--set" "--output" "--sim" "--json") dict) -}}
{{- end -}}

{{/* (list name words own foreign): words as the command reads them, a flag's value after "=" or as the next word. */}}
{{- define "gpumgr.checkFlags" -}}
{{- $name := index . 0 -}}
{{- $own := index . 2 -}}
{{- $foreign := index . 3 -}}
{{- $waits := "" -}}
{{- range $word := index . 1 -}}
{{- if $waits -}}
{{- if regexMatch "^(-|$)" $word -}}{{- fail (printf "%s: %s needs a value" $name $waits) -}}{{- end -}}
{{- if eq $waits "--set" -}}{{- include "gpumgr.checkAssignment" (list $name $word) -}}{{- end -}}
{{- $waits = "" -}}
{{- else -}}
{{- $flag := splitList "=" $word | first -}}
{{- $spelt := regexReplaceAll "^-v[0-9]*$" $flag "--v" | replace "_" "-" -}}
{{- $rule := get $foreign $spelt | default dict -}}
{{- if not (or $rule.taken (has $flag $own)) -}}
{{- $others := $foreign | empty | ternary "" " and no flag of gpu-manager's that is taken here" -}}
{{- $remedy := dig $spelt "give" "what the agent is to know below settings" (include "gpumgr.flags" . | fromYaml) -}}
{{- fail (printf "%s: %s is none of %s%s; give %s" $name $word (join ", " $own) $others $remedy) -}}
{{- end -}}
{{- if contains "=" $word -}}
{{- if eq $flag "--set" -}}{{- include "gpumgr.checkAssignment" (list $name (trimPrefix "--set=" $word)) -}}{{- end -}}
{{- else if not (or $rule.alone (eq $flag "--json") (regexMatch "^-v[0-9]" $flag)) -}}
{{- $waits = $flag -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $waits -}}{{- fail (printf "%s: %s needs a value" $name $waits) -}}{{- end -}}
{{- end -}}

{{/* (list name text): the assignment after --set. */}}
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

{{/*
Other flags of `gpumgr run`, gpu-manager's included: those that are accepted (alone: without a value), because they change nothing that
the chart evaluates; for the others, what to use instead.
*/}}
{{- define "gpumgr.flags" -}}
--addr: {give: settings.display.socket}
--allocation-check-period: {taken: true}
--alsologtostderr: {taken: true, alone: true}
--cgroup-driver: {taken: true}
--checkpoint-path: {give: settings.checkpoint.gpu_manager_checkpoint}
--container-runtime-endpoint: {give: settings.cri.socket}
--device-plugin-path: {give: settings.kubelet.device_plugin_dir}
--driver: {taken: true}
--extra-config: {give: settings.container.extra_devices}
--hostname-override: {give: "nothing, since each agent has its node's name from the chart"}
--kubeconfig: {give: settings.kubernetes.kubeconfig}
--log-backtrace-at: {taken: true}
--log-dir: {taken: true}
--logtostderr: {taken: true, alone: true}
--node-labels: {give: settings.kubernetes.node_labels}
--query-addr: {give: settings.http.address}
--query-port: {give: settings.http.port}
--runtime-request-timeout: {taken: true}
--sample-period: {taken: true, give: settings.nvml.sample_period_seconds}
--share-mode: {taken: true, alone: true, give: settings.placement.share_mode}
--standalone: {give: settings.kubernetes.enabled}
--stderrthreshold: {taken: true}
--v: {taken: true, give: settings.log.level}
--version: {give: "nothing, since the agent would end with it"}
--virtual-manager-path: {give: settings.container.allocation_dir}
--vmodule: {taken: true}
--volume-config: {give: settings.container.driver_share_dir and settings.container.driver_whole_dir}
--wait-timeout: {taken: true}
{{- end -}}
