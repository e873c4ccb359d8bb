{{- define "gpumgr.schedulerName" -}}
{{- include "gpumgr.fullname" . }}-scheduler
{{- end -}}

{{/* The second kube-scheduler. */}}
{{- define "gpumgr.kubeSchedulerName" -}}
{{- include "gpumgr.fullname" . }}-kube-scheduler
{{- end -}}

{{/* (list . "scheduler"): not the agent's own name, which its DaemonSet and Services select. */}}
{{- define "gpumgr.schedulerSelector" -}}
app.kubernetes.io/name: {{ include "gpumgr.name" (index . 0) | trunc 48 }}-{{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end -}}

{{- define "gpumgr.schedulerPodLabels" -}}
{{ include "gpumgr.schedulerSelector" . }}
app.kubernetes.io/part-of: {{ (index . 0).Chart.Name }}
{{- end -}}

{{- define "gpumgr.schedulerLabels" -}}
{{- $root := index . 0 -}}
{{ include "gpumgr.schedulerPodLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The name that is in the extender's certificate, and that kube-scheduler connects to. */}}
{{- define "gpumgr.schedulerHost" -}}
{{- printf "%s.%s.svc" (include "gpumgr.schedulerName" .) .Release.Namespace -}}
{{- end -}}

{{- define "gpumgr.serverSecret" -}}
{{- .Values.scheduler.tls.serverSecret | default (printf "%s-tls" (include "gpumgr.schedulerName" .)) -}}
{{- end -}}

{{- define "gpumgr.clientSecret" -}}
{{- .Values.scheduler.tls.clientSecret | default (printf "%s-client-tls" (include "gpumgr.schedulerName" .)) -}}
{{- end -}}

{{/* A document of config/scheduler or config/claims, with the labels of this release: (list . document component). */}}
{{- define "gpumgr.schedulerObject" -}}
{{- $root := index . 0 -}}
{{- $object := index . 1 | fromYaml -}}
{{- $_ := set $object.metadata "labels" (include "gpumgr.schedulerLabels" (list $root (index . 2)) | fromYaml) -}}
{{- toYaml $object -}}
{{- end -}}

{{/* The settings file of the scheduler: its own section, and what it shares with the agent. */}}
{{- define "gpumgr.schedulerFile" -}}
{{- $settings := pick .Values.settings "scheduler" "log" "hami" | deepCopy -}}
{{- with dig "node" "profile" "" .Values.settings -}}{{- $_ := set $settings "node" (dict "profile" .) -}}{{- end -}}
{{- $_ := set $settings "process" (dict "stop_grace_seconds" (dig "process" "stop_grace_seconds" 5.0 .Values.settings)) -}}
{{- with include "gpumgr.schedulerHttp" . | fromYaml -}}{{- $_ := set $settings "http" . -}}{{- end -}}
{{- $own := include "gpumgr.schedulerOwnKeys" . | fromYaml -}}
{{- if and (ne .Values.scheduler.tls.source "existing") (not (dig "scheduler" "client_names" "" .Values.settings)) -}}
{{/* An issuer may sign certificates of others too. */}}
{{- $_ := set $own "client_names" (list "gpumgr-kube-scheduler") -}}
{{- end -}}
{{- with include "gpumgr.webhookSettings" . | fromYaml -}}{{- $_ := set $settings "webhook" . -}}{{- end -}}
{{- toYaml (mergeOverwrite $settings (dict "scheduler" $own)) -}}
{{- end -}}

{{- define "gpumgr.webhookSettings" -}}
{{- if include "gpumgr.hasWebhook" . -}}
port: {{ .Values.scheduler.webhookPort }}
tls_cert_file: /etc/gpumgr-webhook-tls/tls.crt
tls_key_file: /etc/gpumgr-webhook-tls/tls.key
scheduler_name: {{ include "gpumgr.hamiScheduler" . }}
{{- with .Values.scheduler.admissionPolicies }}
runtime_class: {{ default "" .hamiRuntimeClass | quote }}
default_gpus: {{ .hamiDefaultGpus }}
core_policy: {{ .hamiCorePolicy }}
hide_gpus: {{ .hamiHideGpus }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "gpumgr.schedulerOwnKeys" -}}
tls_cert_file: /etc/gpumgr-scheduler-tls/tls.crt
tls_key_file: /etc/gpumgr-scheduler-tls/tls.key
client_ca_file: /etc/gpumgr-scheduler-tls/ca.crt
leader_election: true
lease_name: {{ include "gpumgr.schedulerName" . }}
{{- end -}}

{{/* Who may read its page: the same as the node's page. */}}
{{- define "gpumgr.schedulerHttp" -}}
{{- $http := get (include "gpumgr.file" . | fromYaml) "http" | default dict -}}
{{- $files := dict -}}
{{- range $key := list "token_file" "tls_cert_file" "tls_key_file" "client_ca_file" -}}
{{- with get $http $key -}}{{- $_ := set $files $key . -}}{{- end -}}
{{- end -}}
{{- toYaml $files -}}
{{- end -}}

{{/* Configuration of the kube-scheduler that calls the extender: config/scheduler/kube-scheduler.yaml with this release's addresses. */}}
{{- define "gpumgr.kubeSchedulerConfig" -}}
{{- $config := .Files.Get "files/kube-scheduler.yaml" | fromYaml -}}
{{- $own := .Values.scheduler.kubeScheduler.enabled -}}
{{- if $own -}}
{{- $_ := unset $config.clientConnection "kubeconfig" -}}
{{- $lease := dict "leaderElect" true "resourceLock" "leases" "resourceName" (include "gpumgr.kubeSchedulerName" .) "resourceNamespace" .Release.Namespace -}}
{{- $_ := set $config "leaderElection" $lease -}}
{{- else -}}
{{- $_ := set $config "leaderElection" (dict "leaderElect" true) -}}
{{- end -}}
{{- $extender := first $config.extenders -}}
{{- $host := include "gpumgr.schedulerHost" . -}}
{{- $_ := set $extender "urlPrefix" (printf "https://%s:443/scheduler" $host) -}}
{{- $_ := set $extender "enableHTTPS" true -}}
{{- $folder := $own | ternary "/etc/gpumgr-client-tls" "/etc/kubernetes/gpumgr-client-tls" -}}
{{- $tls := dict "serverName" $host -}}
{{- $_ := set $tls "caFile" (printf "%s/ca.crt" $folder) -}}
{{- $_ := set $tls "certFile" (printf "%s/tls.crt" $folder) -}}
{{- $_ := set $tls "keyFile" (printf "%s/tls.key" $folder) -}}
{{- $_ := set $extender "tlsConfig" $tls -}}
{{- if include "gpumgr.servesHami" . -}}
{{/* No node has the amounts in its allocatable resources, so kube-scheduler must not look for them there. */}}
{{- range $key, $name := include "gpumgr.hamiResources" . | fromYaml -}}
{{- $resource := dict "name" $name "ignoredByScheduler" (ne $key "count_resource") -}}
{{- $_ := set $extender "managedResources" (append $extender.managedResources $resource) -}}
{{- end -}}
{{- end -}}
{{- $profile := first $config.profiles -}}
{{- $_ := set $profile "schedulerName" .Values.scheduler.kubeScheduler.schedulerName -}}
{{- $version := .Capabilities.KubeVersion.Version -}}
{{- if semverCompare "<1.25.0-0" $version -}}
{{/* Before v1 there was one percentage for all profiles. */}}
{{- $_ := set $config "percentageOfNodesToScore" $profile.percentageOfNodesToScore -}}
{{- $_ := unset $profile "percentageOfNodesToScore" -}}
{{- $beta := semverCompare ">=1.23.0-0" $version | ternary "v1beta3" (semverCompare ">=1.22.0-0" $version | ternary "v1beta2" "v1beta1") -}}
{{- $_ := set $config "apiVersion" (printf "kubescheduler.config.k8s.io/%s" $beta) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* "yes" if pods may have HAMi's resources. */}}
{{- define "gpumgr.servesHami" -}}
{{- if has (dig "node" "profile" "tencent" .Values.settings) (list "hami" "both") -}}yes{{- end -}}
{{- end -}}

{{/* HAMi's resources by the key of their setting: as HAMi names them, ... */}}
{{- define "gpumgr.hamiDefaults" -}}
count_resource: nvidia.com/gpu
memory_resource: nvidia.com/gpumem
memory_percentage_resource: nvidia.com/gpumem-percentage
core_resource: nvidia.com/gpucores
priority_resource: nvidia.com/priority
{{- end -}}

{{/* ... and as the settings name them. */}}
{{- define "gpumgr.hamiResources" -}}
{{- range $key, $name := include "gpumgr.hamiDefaults" . | fromYaml }}
{{ $key }}: {{ dig "hami" $key $name $.Values.settings }}
{{- end }}
{{- end -}}

{{/* Without a tag: the cluster's own version, without what providers add to it (v1.33.1-gke.100). */}}
{{- define "gpumgr.kubeSchedulerImage" -}}
{{- with .Values.scheduler.kubeScheduler.image -}}
{{- .repository -}}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ default (regexFind "^v?[0-9]+\\.[0-9]+\\.[0-9]+" $.Capabilities.KubeVersion.Version) .tag }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* All Deployments: (list . component values). One replica at a time is replaced, by one that is ready. */}}
{{- define "gpumgr.schedulerDeployment" -}}
replicas: {{ (index . 2).replicas }}
selector:
  matchLabels:
    {{- include "gpumgr.schedulerSelector" . | nindent 4 }}
strategy:
  type: RollingUpdate
  rollingUpdate:
    maxUnavailable: 0
    maxSurge: 1
{{- end -}}

{{/* Where and as whom the pods of all Deployments run: (list . component values account), with the values of the place for others than
the scheduler's. */}}
{{- define "gpumgr.schedulerPod" -}}
{{- $root := index . 0 -}}
{{- $values := $root.Values.scheduler -}}
{{- if gt (len .) 4 -}}{{- $values = index . 4 -}}{{- end -}}
serviceAccountName: {{ index . 3 }}
automountServiceAccountToken: true
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if $values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
# Variables of all Services could be read as settings.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  # The files of Secrets belong to this group.
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
{{- if $values.affinity }}
  {{- toYaml $values.affinity | nindent 2 }}
{{- else }}
  # Preferred only: on two nodes an update needs room for a third pod.
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "gpumgr.schedulerSelector" . | nindent 14 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "gpumgr.schedulerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* At most one pod of a Deployment is evicted at a time: (list . component name). */}}
{{- define "gpumgr.schedulerBudget" -}}
{{- $root := index . 0 -}}
apiVersion: {{ semverCompare ">=1.21.0-0" $root.Capabilities.KubeVersion.Version | ternary "policy/v1" "policy/v1beta1" }}
kind: PodDisruptionBudget
metadata:
  name: {{ index . 2 }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "gpumgr.schedulerLabels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "gpumgr.schedulerSelector" . | nindent 6 }}
{{- end -}}

{{- define "gpumgr.checkScheduler" -}}
{{- $values := .Values.scheduler -}}
{{- $secrets := list "serverSecret" "clientSecret" -}}
{{- if include "gpumgr.hasWebhook" . -}}
{{- $secrets = append $secrets "webhookSecret" -}}
{{- if and (eq $values.tls.source "existing") (not $values.tls.webhookAuthority) -}}
{{- fail "scheduler.tls.source existing needs scheduler.tls.webhookAuthority: the CA certificate, in PEM, of the webhook's certificate" -}}
{{- end -}}
{{- end -}}
{{- range $key := $secrets -}}
{{- if and (eq $values.tls.source "existing") (not (get $values.tls $key)) -}}
{{- fail (printf "scheduler.tls.source existing needs scheduler.tls.%s: the name of a Secret with tls.crt, tls.key and ca.crt" $key) -}}
{{- end -}}
{{- end -}}
{{- if .Values.settings.webhook -}}
{{- fail "settings.webhook: given by the chart, from scheduler.webhookPort and scheduler.admissionPolicies; leave it out" -}}
{{- end -}}
{{- if has (int $values.webhookPort) (list (int $values.port) (include "gpumgr.schedulerHttpPort" . | int)) -}}
{{- fail (printf "scheduler.webhookPort: %d is another port of the scheduler, too; give another one" (int $values.webhookPort)) -}}
{{- end -}}
{{- if eq (include "gpumgr.serverSecret" .) (include "gpumgr.clientSecret" .) -}}
{{- fail "scheduler.tls: serverSecret and clientSecret must be two Secrets, or each program could act as the other" -}}
{{- end -}}
{{- if eq (int $values.port) (include "gpumgr.schedulerHttpPort" . | int) -}}
{{- fail (printf "scheduler.port: settings.scheduler.http_port has %d too; give another port" (int $values.port)) -}}
{{- end -}}
{{- if not (include "gpumgr.schedulerHttpPort" . | int) -}}
{{- fail "settings.scheduler.http_port: the probes need a fixed one, 1 to 65535" -}}
{{- end -}}
{{- range $key := include "gpumgr.schedulerOwnKeys" . | fromYaml | keys -}}
{{- if hasKey (default dict $.Values.settings.scheduler) $key -}}
{{- fail (printf "settings.scheduler.%s: given by the chart; leave it out" $key) -}}
{{- end -}}
{{- end -}}
{{/* The scheduler's pod has the two Secrets, and none of extraVolumes. */}}
{{- range $key, $path := include "gpumgr.schedulerHttp" . | fromYaml -}}
{{- if not (regexMatch "^/(etc/gpumgr-token|etc/gpumgr-tls|opt|etc/ssl)/" $path) -}}
{{- fail (printf "settings.http.%s: the scheduler's pod has no file %s; bring it by http.tokenSecret or http.tlsSecret" $key $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
