{{/* One setting, as text: (list . "http" "port"). Empty where it is not given. */}}
{{- define "gpumgr.setting" -}}
{{- dig (index . 1) (index . 2) "" (index . 0).Values.settings -}}
{{- end -}}

{{/* The same for a path that must be known here, because the host's folder is mounted. */}}
{{- define "gpumgr.path" -}}
{{- $name := printf "settings.%s.%s" (index . 1) (index . 2) -}}
{{- include "gpumgr.setting" . | required (printf "%s: a path is needed, for the host's folder is mounted; leave the key out for the default" $name) | clean -}}
{{- end -}}

{{- define "gpumgr.port" -}}
{{- $port := dig "http" "port" 5678 .Values.settings | int -}}
{{- if not $port -}}{{ fail "settings.http.port: the probes need a fixed one, 1 to 65535" }}{{- end -}}
{{- $port -}}
{{- end -}}

{{- define "gpumgr.scheme" -}}
{{- if or .Values.http.tlsSecret (include "gpumgr.setting" (list . "http" "tls_cert_file")) -}}HTTPS{{- else -}}HTTP{{- end -}}
{{- end -}}

{{/* "yes" where the agent talks to the API server as its pod's account, and not as a kubeconfig's user. */}}
{{- define "gpumgr.usesAccount" -}}
{{- if and (dig "kubernetes" "enabled" true .Values.settings) (not (include "gpumgr.setting" (list . "kubernetes" "kubeconfig"))) -}}yes{{- end -}}
{{- end -}}

{{/* "yes" where some container may get its limits from MPS by name. */}}
{{- define "gpumgr.namesMps" -}}
{{- $enforcement := default dict .Values.settings.enforcement -}}
{{- if eq (default "auto" $enforcement.backend) "mps" -}}yes{{- end -}}
{{- range $enforcement.overrides -}}{{- if hasSuffix "=mps" . -}}yes{{- end -}}{{- end -}}
{{- end -}}

{{/* What can't work together, each with a sentence. */}}
{{- define "gpumgr.check" -}}
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
{{- if and $values.metrics.podMonitor.enabled $values.metrics.serviceMonitor.enabled -}}
{{- fail "metrics.podMonitor and metrics.serviceMonitor: enable one of them, or everything is scraped twice" -}}
{{- end -}}
{{- if and $values.metrics.serviceMonitor.enabled (not $values.metrics.service.enabled) -}}
{{- fail "metrics.serviceMonitor needs metrics.service.enabled: true; metrics.podMonitor does without" -}}
{{- end -}}
{{- $folders := list (include "gpumgr.path" (list . "enforcement" "run_dir")) (include "gpumgr.path" (list . "checkpoint" "dir")) -}}
{{- range $key := list (list "http" "socket") (list "display" "socket") (list "process" "lock_path") -}}
{{- $path := include "gpumgr.path" (list $ (index $key 0) (index $key 1)) -}}
{{- $kept := dict -}}
{{- range $folders -}}{{- if hasPrefix (printf "%s/" .) $path -}}{{- $_ := set $kept "yes" true -}}{{- end -}}{{- end -}}
{{- if not $kept -}}
{{- fail (printf "settings.%s.%s: %s must lie in %s: those are mounted from the host" (index $key 0) (index $key 1) $path (join " or " $folders)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Which of the driver's files the NVIDIA container runtime is to bring. */}}
{{- define "gpumgr.driverCapabilities" -}}
{{- if include "gpumgr.setting" (list . "vcuda" "library_path") -}}all
{{- else -}}utility
{{- end -}}
{{- end -}}

{{/* The agent's settings file: what is given, and what other values mean for it. */}}
{{- define "gpumgr.file" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- if .Values.http.tokenSecret -}}
{{- $settings = mergeOverwrite $settings (dict "http" (dict "token_file" "/etc/gpumgr-token/token")) -}}
{{- end -}}
{{- if .Values.http.tlsSecret -}}
{{- $settings = mergeOverwrite $settings (dict "http" (dict "tls_cert_file" "/etc/gpumgr-tls/tls.crt" "tls_key_file" "/etc/gpumgr-tls/tls.key")) -}}
{{- end -}}
{{- if and .Values.driver.root (not (include "gpumgr.setting" (list . "vcuda" "driver_roots"))) -}}
{{- $settings = mergeOverwrite $settings (dict "vcuda" (dict "driver_roots" (list "/driver-root"))) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}
