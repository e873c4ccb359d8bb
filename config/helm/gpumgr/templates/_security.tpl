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
    # Which containers have a folder mounted: /proc/PID/ns/mnt of other users' processes. Without it the files of living containers
    # would be taken for leftovers.
    - SYS_PTRACE
    {{- $backend := default "auto" (include "gpumgr.setting" (list . "enforcement" "backend")) }}
    {{- $words := list $backend }}
    {{- range dig "enforcement" "overrides" list .Values.settings }}{{ $words = append $words (splitList "=" . | last) }}{{ end }}
    {{- if or (has "auto" $words) (has "nvml-memory" $words) }}
    # The driver takes limits on memory from an administrator alone (nvmlDeviceSetMemoryLimits).
    - SYS_ADMIN
    {{- end }}
    {{- if dig "nvml" "load_kernel_modules" false .Values.settings }}
    # modprobe.
    - SYS_MODULE
    {{- end }}
# The default profiles of both keep a container from the host's processes and sockets. Where a node has neither, this is nothing.
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}
appArmorProfile:
  type: Unconfined
{{- end }}
seLinuxOptions:
  type: spc_t
{{- end }}
{{- end -}}
