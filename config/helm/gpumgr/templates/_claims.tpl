{{- define "gpumgr.claimsName" -}}
{{- include "gpumgr.fullname" . }}-claims
{{- end -}}

{{- define "gpumgr.claimsHttpPort" -}}
{{- dig "claims" "http_port" 5680 .Values.settings | int -}}
{{- end -}}

{{/* The settings file of `gpumgr claims`: its own section, the quotas of the scheduler's, and what it shares with the agent. */}}
{{- define "gpumgr.claimsFile" -}}
{{- $settings := pick .Values.settings "claims" "log" "hami" | deepCopy -}}
{{- with dig "node" "profile" "" .Values.settings -}}{{- $_ := set $settings "node" (dict "profile" .) -}}{{- end -}}
{{- $_ := set $settings "scheduler" (pick (default dict .Values.settings.scheduler) "quota_configmap" "quota_model_label" "quota_pool_label") -}}
{{- with include "gpumgr.schedulerHttp" . | fromYaml -}}{{- $_ := set $settings "http" . -}}{{- end -}}
{{- $own := dict "leader_election" true "lease_name" (include "gpumgr.claimsName" .) -}}
{{- toYaml (mergeOverwrite $settings (dict "claims" $own)) -}}
{{- end -}}

{{- define "gpumgr.checkClaims" -}}
{{- if semverCompare "<1.36.0-0" .Capabilities.KubeVersion.Version -}}
{{- fail (printf "claims.enabled needs Kubernetes 1.36 or later, which has MutatingAdmissionPolicies; this cluster has %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if not (include "gpumgr.claimsHttpPort" . | int) -}}
{{- fail "settings.claims.http_port: the probes need a fixed one, 1 to 65535" -}}
{{- end -}}
{{- range $key := list "leader_election" "lease_name" "lease_namespace" -}}
{{- if hasKey (default dict $.Values.settings.claims) $key -}}
{{- fail (printf "settings.claims.%s: given by the chart; leave it out" $key) -}}
{{- end -}}
{{- end -}}
{{- range $key, $path := include "gpumgr.schedulerHttp" . | fromYaml -}}
{{- if not (regexMatch "^/(etc/gpumgr-token|etc/gpumgr-tls|opt|etc/ssl)/" $path) -}}
{{- fail (printf "settings.http.%s: the pod of gpumgr claims has no file %s; bring it by http.tokenSecret or http.tlsSecret" $key $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
