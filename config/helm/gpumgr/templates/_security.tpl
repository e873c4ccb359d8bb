{{/* What the agent's process may do beyond being the host's root without capabilities. */}}
{{- define "gpumgr.securityContext" -}}
# Root owns the kubelet's sockets and the runtime's.
runAsUser: 0
runAsGroup: 0
readOnlyRootFilesystem: true
seccompProfile:
  type: RuntimeDefault
{{- if .Values.privileged }}
privileged: true
{{- else }}
privileged: false
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  add:
    # Which containers have a folder mounted: /proc/PID/ns/mnt of other users' processes. Without it each process is read by itself, and
    # where /proc hides them (hidepid) files of containers that are gone would stay.
    - SYS_PTRACE
    {{- $backend := default "auto" (include "gpumgr.setting" (list . "enforcement" "backend")) }}
    {{- $words := list $backend }}
    {{- range dig "enforcement" "overrides" list .Values.settings }}{{ $words = append $words (splitList "=" . | last) }}{{ end }}
    {{- if or (has "auto" $words) (has "nvml-memory" $words) }}
    # The driver takes limits on memory from an administrator alone (nvmlDeviceSetMemoryLimits).
    - SYS_ADMIN
    {{- else if eq "mig" (include "gpumgr.setting" (list . "hami" "operating_mode")) }}
    # The driver lets an administrator alone turn MIG mode on, and create and destroy MIG devices (nvmlDeviceSetMigMode).
    - SYS_ADMIN
    {{- end }}
# The default profiles of both keep a container from the host's processes and sockets. Where a node has neither, this is nothing.
{{- if include "gpumgr.knowsAppArmor" . }}
appArmorProfile:
  type: Unconfined
{{- end }}
seLinuxOptions:
  type: spc_t
{{- end }}
{{- end -}}

{{/* "yes" where the API server has a field for AppArmor; before 1.30 there were annotations of the pod. */}}
{{- define "gpumgr.knowsAppArmor" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version -}}yes{{- end -}}
{{- end -}}

{{/* The pod's annotations that take AppArmor's default profile off its containers, where those have no field for it. */}}
{{- define "gpumgr.appArmor" -}}
{{- if not (or .Values.privileged (include "gpumgr.knowsAppArmor" .)) -}}
container.apparmor.security.beta.kubernetes.io/gpumgr: unconfined
{{- if .Values.preflight.enabled }}
container.apparmor.security.beta.kubernetes.io/preflight: unconfined
{{- end }}
{{- end -}}
{{- end -}}
