{{- define "gpumgr.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* The release's name, and the chart's unless that is part of it. Room is left for "-dashboard". */}}
{{- define "gpumgr.fullname" -}}
{{- $name := include "gpumgr.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that are constant in a release: selectors cannot be changed. */}}
{{- define "gpumgr.selector" -}}
app.kubernetes.io/name: {{ include "gpumgr.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Of the pods. The monitors take the job's name from part-of, which is gpumgr under whatever name the chart is installed. */}}
{{- define "gpumgr.podLabels" -}}
{{ include "gpumgr.selector" . }}
app.kubernetes.io/part-of: {{ .Chart.Name }}
{{- end -}}

{{- define "gpumgr.labels" -}}
{{ include "gpumgr.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "gpumgr.account" -}}
{{- default (.Values.serviceAccount.create | ternary (include "gpumgr.fullname" .) "default") .Values.serviceAccount.name -}}
{{- end -}}

{{- define "gpumgr.image" -}}
{{- with .Values.image -}}
{{- .repository -}}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ default $.Chart.AppVersion .tag }}{{ end -}}
{{- end -}}
{{- end -}}
