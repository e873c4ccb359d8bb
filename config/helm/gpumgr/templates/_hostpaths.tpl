{{/*
Every host folder that the agent gets: name, path, type, setting (which names the path, or requires it), why; optionally readOnly,
propagation, at (the mount point; by default its own path, because the agent passes host paths to the kubelet).
Folders of sockets, not the sockets: a restarted server creates a new one. HostToContainer where the host mounts something below later:
the folder's file system must be a shared mount for that, which systemd does, but not every host.
*/}}
{{- define "gpumgr.hostPaths" -}}
- name: device-plugins
  path: {{ include "gpumgr.path" (list . "kubelet" "device_plugin_dir") | quote }}
  type: Directory
  setting: kubelet.device_plugin_dir
  why: the kubelet's socket is there, and ours are made beside it
{{- if include "gpumgr.dra" . }}
- name: plugins
  path: {{ include "gpumgr.path" (list . "kubelet" "plugins_dir") | quote }}
  type: Directory
  setting: kubelet.plugins_dir
  why: the socket on which the kubelet prepares ResourceClaims
- name: plugins-registry
  path: {{ include "gpumgr.path" (list . "kubelet" "plugins_registry_dir") | quote }}
  type: Directory
  setting: kubelet.plugins_registry_dir
  why: the kubelet finds its plugins there
{{- end }}
- name: pod-resources
  path: {{ include "gpumgr.path" (list . "kubelet" "pod_resources_socket") | dir | quote }}
  type: Directory
  readOnly: true
  setting: kubelet.pod_resources_socket
  why: the kubelet says there who has which device; a restarted kubelet makes a new socket
- name: state
  path: {{ include "gpumgr.path" (list . "checkpoint" "dir") | quote }}
  type: DirectoryOrCreate
  setting: checkpoint.dir
  why: the ledger and the lock of the node's only agent; on a disk
- name: allocations
  path: {{ include "gpumgr.path" (list . "container" "allocation_dir") | quote }}
  type: DirectoryOrCreate
  setting: container.allocation_dir
  why: a folder for each allocation, which its container has mounted
- name: run
  path: {{ include "gpumgr.path" (list . "enforcement" "run_dir") | quote }}
  type: DirectoryOrCreate
  # Bidirectional: the agent mounts a tmpfs for the files of each container of limiter and hami-core. The host's mount above the folder must be shared, as systemd has it.
  {{- $mounts := or .Values.enforcement.hamiCore.image (include "gpumgr.setting" (list . "hami_core" "library_path")) -}}
  {{- range list "auto" "limiter" "nvml-memory" "hami-core" }}{{ $mounts = or $mounts (include "gpumgr.names" (list $ .)) }}{{ end }}
  propagation: {{ ternary "Bidirectional" (ternary "HostToContainer" "" .Values.mps.enabled) (and .Values.privileged ($mounts | empty | not)) | quote }}
  setting: enforcement.run_dir
  why: sockets and shared memory of running containers, which outlive the agent
- name: cri
  path: {{ include "gpumgr.path" (list . "cri" "socket") | dir | quote }}
  type: Directory
  readOnly: true
  setting: cri.socket
  why: which process runs in which container; a restarted runtime makes a new socket
- name: cgroups
  path: {{ include "gpumgr.path" (list . "cri" "cgroup_root") | quote }}
  type: Directory
  # gpumgr tries the driver's memory limits on a new cgroup.
  readOnly: {{ not (or (include "gpumgr.names" (list . "auto")) (include "gpumgr.names" (list . "nvml-memory"))) }}
  setting: cri.cgroup_root
  why: the processes of each container; with the backend nvml-memory (auto) also a new cgroup, on which a limit is tried
{{- if or (include "gpumgr.dra" .) (eq (include "gpumgr.setting" (list . "enforcement" "injection")) "cdi") }}
- name: cdi
  path: {{ include "gpumgr.path" (list . "enforcement" "cdi_dir") | quote }}
  type: DirectoryOrCreate
  setting: enforcement.cdi_dir
  why: CDI specs for the container runtime
{{- end }}
{{- if .Values.gpuManager.takeOver }}
- name: gpu-manager
  path: {{ include "gpumgr.path" (list . "checkpoint" "gpu_manager_checkpoint") | dir | quote }}
  type: DirectoryOrCreate
  readOnly: true
  setting: checkpoint.gpu_manager_checkpoint
  why: which GPUs its running pods have
{{- end }}
{{- $mirror := include "gpumgr.mirrors" . }}
{{- $used := or .Values.gpuManager.takeOver $mirror }}
{{- $share := include "gpumgr.path" (list . "container" "driver_share_dir") }}
{{- $whole := include "gpumgr.path" (list . "container" "driver_whole_dir") }}
{{- /* The folders' parents, because a missing folder has a meaning. Folders that the values name contain files. */}}
{{- if or $used (ne $share "/etc/gpu-manager/vdriver/nvidia") }}
- name: driver-files
  path: {{ dir $share | quote }}
  type: DirectoryOrCreate
  readOnly: {{ not $mirror }}
  setting: container.driver_share_dir
  why: the driver's files as containers of the backend vcuda get them
{{- end }}
{{- if or $used (ne $whole "/etc/gpu-manager/vdriver/origin") }}
- name: driver-files-whole
  path: {{ dir $whole | quote }}
  type: DirectoryOrCreate
  readOnly: {{ not $mirror }}
  setting: container.driver_whole_dir
  why: the driver's files as containers get them
{{- end }}
{{- range $section := list "hami_core" "vcuda" }}
{{- with include "gpumgr.setting" (list $ $section "library_path") }}
- name: {{ $section | replace "_" "-" }}
  path: {{ dir . | quote }}
  type: Directory
  readOnly: true
  setting: {{ $section }}.library_path
  why: the library that you supply
{{- end }}
{{- end }}
{{- if .Values.driver.root }}
- name: driver-root
  path: {{ clean .Values.driver.root | quote }}
  type: Directory
  readOnly: true
  propagation: HostToContainer
  at: /driver-root
  setting: nvml.library_path
  why: the driver's library, where no runtime brings it
{{- end }}
{{- end -}}

{{/*
The same with each mount point once: `at`, and `reasons` instead of setting and why. Of several with the same mount point the first
gives the name; it is writable if one of them must be, is created if one of them may be, and keeps their propagation.
*/}}
{{- define "gpumgr.hostFolders" -}}
{{- $folders := list -}}
{{- $places := dict -}}
{{- range include "gpumgr.hostPaths" . | fromYamlArray -}}
{{- $at := default .path .at -}}
{{- $reason := printf "%s: %s." .setting .why -}}
{{- if hasKey $places $at -}}
{{- $first := get $places $at -}}
{{- $_ := set $first "readOnly" (and $first.readOnly (default false .readOnly)) -}}
{{- $_ := set $first "propagation" (default .propagation $first.propagation) -}}
{{- $_ := set $first "type" (eq .type "Directory" | ternary $first.type .type) -}}
{{- $_ := set $first "reasons" (append $first.reasons $reason) -}}
{{- else -}}
{{- $folder := dict "name" .name "path" .path "at" $at "type" .type "reasons" (list $reason) -}}
{{- $_ := set $folder "readOnly" (default false .readOnly) -}}
{{- $_ := set $folder "propagation" (default "" .propagation) -}}
{{- $_ := set $places $at $folder -}}
{{- $folders = append $folders $folder -}}
{{- end -}}
{{- end -}}
{{- toYaml $folders -}}
{{- end -}}

{{/* Name of the volume with this mount point: (list . "/var/lib/gpumgr"). */}}
{{- define "gpumgr.volumeAt" -}}
{{- $at := index . 1 -}}
{{- range include "gpumgr.hostFolders" (index . 0) | fromYamlArray -}}
{{- if eq .at $at -}}{{- .name -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* The volumes, each with its setting and reason. */}}
{{- define "gpumgr.hostVolumes" -}}
{{- range include "gpumgr.hostFolders" . | fromYamlArray }}
{{- range .reasons }}
# {{ . }}
{{- end }}
- name: {{ .name }}
  hostPath:
    path: {{ .path | quote }}
    type: {{ .type }}
{{- end }}
{{- end -}}

{{- define "gpumgr.hostMounts" -}}
{{- range include "gpumgr.hostFolders" . | fromYamlArray }}
- name: {{ .name }}
  mountPath: {{ .at | quote }}
{{- if .readOnly }}
  readOnly: true
{{- end }}
{{- with .propagation }}
  mountPropagation: {{ . }}
{{- end }}
{{- end }}
{{- end -}}
