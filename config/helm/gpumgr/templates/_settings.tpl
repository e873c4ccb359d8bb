{{/* One setting, as text: (list . "http" "port"). Empty where it is not given. */}}
{{- define "gpumgr.setting" -}}
{{- dig (index . 1) (index . 2) "" (index . 0).Values.settings -}}
{{- end -}}

{{/* The same for a path that must be known here, because the host's folder is mounted. */}}
{{- define "gpumgr.path" -}}
{{- $name := printf "settings.%s.%s" (index . 1) (index . 2) -}}
{{- $remedy := printf "a null for it or for settings.%s takes its default away: remove the null, or give a path" (index . 1) -}}
{{- include "gpumgr.setting" . | required (printf "%s: a path is needed, for the host's folder is mounted; %s" $name $remedy) | clean -}}
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

{{/* "yes" where the nodes offer their GPUs by Dynamic Resource Allocation. */}}
{{- define "gpumgr.dra" -}}
{{- if eq (include "gpumgr.setting" (list . "node" "mode")) "dra" -}}yes{{- end -}}
{{- end -}}

{{/* "yes" where some container may get its limits from this mechanism by name: (list . "mps"). */}}
{{- define "gpumgr.names" -}}
{{- $enforcement := default dict (index . 0).Values.settings.enforcement -}}
{{- $words := list (default "auto" $enforcement.backend) -}}
{{- range $enforcement.overrides -}}{{- $words = append $words (splitList "=" . | last) -}}{{- end -}}
{{- if has (index . 1) $words -}}yes{{- end -}}
{{- end -}}

{{/* "yes" where the agent listens on an address that only its own host reaches. */}}
{{- define "gpumgr.loopback" -}}
{{- if regexMatch "^(127\\.[0-9.]+|::1|localhost\\.?)$" (include "gpumgr.setting" (list . "http" "address") | lower) -}}yes{{- end -}}
{{- end -}}

{{/* "yes" where metrics are for those alone who show a token or a certificate: whoever goes by annotations has neither. */}}
{{- define "gpumgr.asksScrapers" -}}
{{- if or .Values.http.tokenSecret (include "gpumgr.setting" (list . "http" "token_file")) (include "gpumgr.setting" (list . "http" "client_ca_file")) -}}yes{{- end -}}
{{- end -}}

{{/* "yes" where the agent copies the driver's files for containers, or does on some nodes. */}}
{{- define "gpumgr.mirrors" -}}
{{- if include "gpumgr.setting" (list . "vcuda" "library_path") -}}yes
{{- else if ne (include "gpumgr.setting" (list . "container" "driver_files")) "toolkit" -}}yes
{{- end -}}
{{- end -}}

{{/* Which of the driver's files the NVIDIA container runtime is to bring. */}}
{{- define "gpumgr.driverCapabilities" -}}
{{- if include "gpumgr.mirrors" . -}}all
{{- else -}}compute,utility
{{- end -}}
{{- end -}}

{{/* The agent's settings file: what is given, and what other values mean for it. The scheduler and `gpumgr claims` have files of their own. */}}
{{- define "gpumgr.file" -}}
{{- $settings := omit .Values.settings "scheduler" "webhook" "claims" | deepCopy -}}
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

{{/* The same without what a running agent takes from the changed file by itself. */}}
{{- define "gpumgr.fileWithoutLive" -}}
{{- $live := .Files.Get "files/live.yaml" | fromYaml -}}
{{- $fixed := dict -}}
{{- range $section, $keys := include "gpumgr.file" . | fromYaml -}}
{{- range $key, $value := $keys -}}
{{- if not (has $key (dig $section list $live)) -}}{{- $_ := set $fixed (printf "%s.%s" $section $key) $value -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $fixed -}}
{{- end -}}
