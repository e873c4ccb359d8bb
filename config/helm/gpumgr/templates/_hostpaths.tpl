{{/*
Every folder of the host that the agent gets: name, path, type, setting (which names the path, or makes it needed), why; besides readOnly,
propagation, at (where it is mounted; without it at its own path, because the agent tells the kubelet paths of the host).
Folders of sockets and not the sockets: whoever restarts makes a new one. HostToContainer where the host mounts something below later:
it must have made the folder's own file system shared for that, which systemd does and not every host.
*/}}
{{- define "gpumgr.hostPaths" -}}
{{- $settings := .Values.settings -}}
- name: device-plugins
  path: {{ include "gpumgr.path" (list . "kubelet" "device_plugin_dir") }}
  type: Directory
  setting: kubelet.device_plugin_dir
  why: the kubelet's socket is there, and ours are made beside it
- name: pod-resources
  path: {{ include "gpumgr.path" (list . "kubelet" "pod_resources_socket") | dir }}
  type: Directory
  readOnly: true
  setting: kubelet.pod_resources_socket
  why: the kubelet says there who has which device; a restarted kubelet makes a new socket
- name: state
  path: {{ include "gpumgr.path" (list . "checkpoint" "dir") }}
  type: DirectoryOrCreate
  setting: checkpoint.dir
  why: the ledger and the lock of the node's only agent; on a disk
- name: allocations
  path: {{ include "gpumgr.path" (list . "container" "allocation_dir") }}
  type: DirectoryOrCreate
  setting: container.allocation_dir
  why: a folder for each allocation, which its container has mounted
- name: run
  path: {{ include "gpumgr.path" (list . "enforcement" "run_dir") }}
  type: DirectoryOrCreate
  propagation: {{ .Values.mps.enabled | ternary "HostToContainer" "" | quote }}
  setting: enforcement.run_dir
  why: sockets and shared memory of running containers, which outlive the agent
- name: cri
  path: {{ include "gpumgr.path" (list . "cri" "socket") | dir }}
  type: Directory
  readOnly: true
  setting: cri.socket
  why: which process runs in which container; a restarted runtime makes a new socket
- name: cgroups
  path: {{ include "gpumgr.path" (list . "cri" "cgroup_root") }}
  type: Directory
  readOnly: true
  setting: cri.cgroup_root
  why: the processes of each container
{{- if eq (include "gpumgr.setting" (list . "enforcement" "injection")) "cdi" }}
- name: cdi
  path: {{ include "gpumgr.path" (list . "enforcement" "cdi_dir") }}
  type: DirectoryOrCreate
  setting: enforcement.cdi_dir
  why: CDI specs for the container runtime
{{- end }}
{{- if .Values.gpuManager.takeOver }}
- name: gpu-manager
  path: {{ include "gpumgr.path" (list . "checkpoint" "gpu_manager_checkpoint") | dir }}
  type: DirectoryOrCreate
  readOnly: true
  setting: checkpoint.gpu_manager_checkpoint
  why: which GPUs its running pods have; read once
{{- end }}
{{- $mirror := include "gpumgr.setting" (list . "vcuda" "library_path") }}
{{- if or .Values.gpuManager.takeOver $mirror }}
{{- $share := include "gpumgr.path" (list . "container" "driver_share_dir") | dir }}
{{- $whole := include "gpumgr.path" (list . "container" "driver_whole_dir") | dir }}
- name: driver-files
  path: {{ $share }}
  type: DirectoryOrCreate
  readOnly: {{ not $mirror }}
  setting: container.driver_share_dir
  why: the driver's files as containers get them
{{- if ne $share $whole }}
- name: driver-files-whole
  path: {{ $whole }}
  type: DirectoryOrCreate
  readOnly: {{ not $mirror }}
  setting: container.driver_whole_dir
  why: the driver's files as containers with whole GPUs get them
{{- end }}
{{- end }}
{{- range $section := list "hami_core" "vcuda" }}
{{- with include "gpumgr.setting" (list $ $section "library_path") }}
- name: {{ $section | replace "_" "-" }}
  path: {{ dir . }}
  type: Directory
  readOnly: true
  setting: {{ $section }}.library_path
  why: the library that you supply
{{- end }}
{{- end }}
{{- if .Values.driver.root }}
- name: driver-root
  path: {{ clean .Values.driver.root }}
  type: Directory
  readOnly: true
  propagation: HostToContainer
  at: /driver-root
  setting: nvml.library_path
  why: the driver's library, where no runtime brings it
{{- end }}
{{- if dig "nvml" "load_kernel_modules" false $settings }}
- name: modules
  path: /lib/modules
  type: Directory
  readOnly: true
  setting: nvml.load_kernel_modules
  why: modprobe reads them
{{- end }}
{{- end -}}

{{/* The volumes, each with the setting that it is for and why. */}}
{{- define "gpumgr.hostVolumes" -}}
{{- range include "gpumgr.hostPaths" . | fromYamlArray }}
# {{ .setting }}: {{ .why }}.
- name: {{ .name }}
  hostPath:
    path: {{ .path | quote }}
    type: {{ .type }}
{{- end }}
{{- end -}}

{{- define "gpumgr.hostMounts" -}}
{{- range include "gpumgr.hostPaths" . | fromYamlArray }}
- name: {{ .name }}
  mountPath: {{ default .path .at | quote }}
{{- if .readOnly }}
  readOnly: true
{{- end }}
{{- with .propagation }}
  mountPropagation: {{ . }}
{{- end }}
{{- end }}
{{- end -}}
