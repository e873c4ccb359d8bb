{{/* Values that cannot work, or not together, each with an error message. */}}
{{- define "gpumgr.check" -}}
{{- include "gpumgr.checkRights" . -}}
{{- include "gpumgr.checkLibraries" . -}}
{{- include "gpumgr.checkWeb" . -}}
{{- include "gpumgr.checkFiles" . -}}
{{- include "gpumgr.checkCertificates" . -}}
{{- include "gpumgr.checkMetrics" . -}}
{{- include "gpumgr.checkSockets" . -}}
{{- include "gpumgr.checkFolders" . -}}
{{- include "gpumgr.checkVariables" . -}}
{{- include "gpumgr.checkArguments" . -}}
{{- include "gpumgr.checkExtras" . -}}
{{- if include "gpumgr.dra" . -}}{{- include "gpumgr.checkDra" . -}}{{- end -}}
{{- if .Values.scheduler.enabled -}}{{- include "gpumgr.checkScheduler" . -}}{{- end -}}
{{- if .Values.claims.enabled -}}{{- include "gpumgr.checkClaims" . -}}{{- end -}}
{{- end -}}

{{- define "gpumgr.checkDra" -}}
{{- if semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version -}}
{{- fail (printf "settings.node.mode dra needs resource.k8s.io/v1, which Kubernetes has since 1.34 (it shares GPUs by default since 1.36); this cluster has %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if not (dig "kubernetes" "enabled" true .Values.settings) -}}
{{- fail "settings.node.mode dra needs settings.kubernetes.enabled: the agent publishes the GPUs in the API server, and reads claims there" -}}
{{- end -}}
{{- end -}}

{{- define "gpumgr.checkRights" -}}
{{- $values := .Values -}}
{{- if and (include "gpumgr.names" (list . "mps")) (not $values.mps.enabled) -}}
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
{{- if eq (include "gpumgr.setting" (list . "nvml" "load_kernel_modules")) "true" -}}
{{- fail "settings.nvml.load_kernel_modules: there is no modprobe in the image; load the driver's modules on the host, by systemd-modules-load or as the driver's package does it" -}}
{{- end -}}
{{- $devices := default "/dev" (include "gpumgr.setting" (list . "container" "device_root")) | clean -}}
{{- if and (ne "/dev" $devices) (not (include "gpumgr.broughtBy" (list .Values.extraVolumeMounts $devices))) -}}
{{- fail (printf "settings.container.device_root: nothing is mounted at %s; leave the key out for /dev, or bring the folder by extraVolumes and extraVolumeMounts" $devices) -}}
{{- end -}}
{{- end -}}

{{/* "yes" if one of these mounts has the path. */}}
{{- define "gpumgr.broughtBy" -}}
{{- $path := printf "%s/" (index . 1 | clean) -}}
{{- $there := dict -}}
{{- range default list (index . 0) -}}
{{- if hasPrefix (printf "%s/" (clean .mountPath)) $path -}}{{- $_ := set $there "yes" true -}}{{- end -}}
{{- end -}}
{{- if $there -}}yes{{- end -}}
{{- end -}}

{{/* A backend with a library needs its path and SHA-256, or the image that brings it: the agent loads no library without them. */}}
{{- define "gpumgr.checkLibraries" -}}
{{- $image := .Values.enforcement.hamiCore.image -}}
{{- range $key := list "library_path" "library_sha256" -}}
{{- if and $image (include "gpumgr.setting" (list $ "hami_core" $key)) -}}
{{- fail (printf "enforcement.hamiCore.image: settings.hami_core.%s takes precedence over the image's library; leave one of them out" $key) -}}
{{- end -}}
{{- end -}}
{{- range $mechanism, $section := dict "hami-core" "hami_core" "vcuda" "vcuda" -}}
{{- if and (include "gpumgr.names" (list $ $mechanism)) (not (and $image (eq $mechanism "hami-core"))) -}}
{{- range $key := list "library_path" "library_sha256" -}}
{{- if not (include "gpumgr.setting" (list $ $section $key)) -}}
{{- $remedy := eq $mechanism "hami-core" | ternary ", or enforcement.hamiCore.image" "" -}}
{{- fail (printf "settings.enforcement names %s, which refuses every share without its library: set settings.%s.%s too%s" $mechanism $section $key $remedy) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gpumgr.checkWeb" -}}
{{- if and (include "gpumgr.loopback" .) (not .Values.hostNetwork) -}}
{{- fail (printf "settings.http.address: the kubelet's probes don't reach %s in the pod; leave the key out for the pod's address, or set hostNetwork" (include "gpumgr.setting" (list . "http" "address"))) -}}
{{- end -}}
{{- end -}}

{{/*
Files that the agent reads in its pod: a mount must provide them, other than the ConfigMap and the empty /tmp. Files of the image below
/opt (such as gpumgr's own client of vcuda) and /etc/ssl cannot be checked here.
*/}}
{{- define "gpumgr.checkFiles" -}}
{{- $mounts := concat (list (dict "mountPath" "/opt") (dict "mountPath" "/etc/ssl")) (default list .Values.extraVolumeMounts) -}}
{{- range include "gpumgr.mounts" . | fromYamlArray -}}
{{- if not (has .name (list "config" "tmp")) -}}{{- $mounts = append $mounts . -}}{{- end -}}
{{- end -}}
{{- $files := list (list . "http" "token_file") (list . "http" "tls_cert_file") (list . "http" "tls_key_file") -}}
{{- $files = concat $files (list (list . "http" "client_ca_file") (list . "vcuda" "client_path") (list . "vcuda" "volume_conf")) -}}
{{- if dig "kubernetes" "enabled" true .Values.settings -}}
{{- $files = append $files (list . "kubernetes" "kubeconfig") -}}
{{- end -}}
{{- $secrets := dict "token_file" "http.tokenSecret" "tls_cert_file" "http.tlsSecret" "tls_key_file" "http.tlsSecret" -}}
{{- range $file := $files -}}
{{- $path := include "gpumgr.setting" $file -}}
{{- if and $path (not (include "gpumgr.broughtBy" (list $mounts $path))) -}}
{{- $name := printf "%s.%s" (index $file 1) (index $file 2) -}}
{{- $remedy := "bring the file by extraVolumes and extraVolumeMounts, or below /opt or /etc/ssl in an image of your own" -}}
{{- with get $secrets (index $file 2) -}}{{- $remedy = printf "%s, or leave the key out and name a Secret by %s" $remedy . -}}{{- end -}}
{{- fail (printf "settings.%s: nothing is mounted where %s is; %s" $name $path $remedy) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* TLS needs a certificate and its key, and client_ca_file needs both: the agent does not start without them (gpumgr/web/credentials.py). */}}
{{- define "gpumgr.checkCertificates" -}}
{{- $http := get (include "gpumgr.file" . | fromYaml) "http" | default dict -}}
{{- range $named := list "tls_cert_file" "tls_key_file" "client_ca_file" -}}
{{- range $needed := list "tls_cert_file" "tls_key_file" -}}
{{- if and (get $http $named) (not (get $http $needed)) -}}
{{- fail (printf "settings.http.%s needs settings.http.%s too; name that file, or a Secret of type kubernetes.io/tls by http.tlsSecret" $named $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gpumgr.checkMetrics" -}}
{{- $metrics := .Values.metrics -}}
{{- if and $metrics.podMonitor.enabled $metrics.serviceMonitor.enabled -}}
{{- fail "metrics.podMonitor and metrics.serviceMonitor: enable one of them, or everything is scraped twice" -}}
{{- end -}}
{{- if and $metrics.serviceMonitor.enabled (not $metrics.service.enabled) -}}
{{- fail "metrics.serviceMonitor needs metrics.service.enabled: true; metrics.podMonitor does without" -}}
{{- end -}}
{{- if eq (default "" $metrics.service.alias) (printf "%s-metrics" (include "gpumgr.fullname" .)) -}}
{{- fail (printf "metrics.service.alias: the first Service is named %s already; give another name, or none" $metrics.service.alias) -}}
{{- end -}}
{{- end -}}

{{/* Files that other programs of the host open, or that must outlive the pod, must be in a mounted folder of the host. */}}
{{- define "gpumgr.checkSockets" -}}
{{- $folders := list (include "gpumgr.path" (list . "enforcement" "run_dir")) (include "gpumgr.path" (list . "checkpoint" "dir")) -}}
{{- $keys := list (list "http" "socket") (list "process" "lock_path") -}}
{{- if dig "display" "enabled" true .Values.settings -}}{{- $keys = append $keys (list "display" "socket") -}}{{- end -}}
{{- range $key := $keys -}}
{{- $path := include "gpumgr.path" (list $ (index $key 0) (index $key 1)) -}}
{{- $kept := dict -}}
{{- range $folders -}}{{- if hasPrefix (printf "%s/" .) $path -}}{{- $_ := set $kept "yes" true -}}{{- end -}}{{- end -}}
{{- if not (or $kept (include "gpumgr.broughtBy" (list $.Values.extraVolumeMounts $path))) -}}
{{- fail (printf "settings.%s.%s: %s must lie in %s: those are mounted from the host" (index $key 0) (index $key 1) $path (join " or " $folders)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* No folder of the host may hide files of the image and the pod: the agent would not start. */}}
{{- define "gpumgr.checkFolders" -}}
{{- $own := list "/opt/gpumgr" "/usr/bin" "/usr/lib" "/usr/lib64" "/bin" "/sbin" "/lib" "/lib64" "/proc" "/sys" "/dev" -}}
{{- $own = concat $own (list "/usr/lib/x86_64-linux-gnu" "/usr/lib/aarch64-linux-gnu" "/lib/x86_64-linux-gnu" "/lib/aarch64-linux-gnu") -}}
{{- $own = concat $own (list "/etc/gpumgr" "/etc/gpumgr-token" "/etc/gpumgr-tls" "/tmp" "/driver-root") -}}
{{- if include "gpumgr.usesAccount" . -}}
{{- $own = concat $own (list "/run/secrets" "/var/run/secrets") -}}
{{- end -}}
{{- range $folder := include "gpumgr.hostPaths" . | fromYamlArray -}}
{{- if not $folder.at -}}
{{- range $own -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" $folder.path)) (printf "%s/" .) -}}
{{- fail (printf "settings.%s: all of the host's %s would be mounted, over the pod's own %s; let it lie in another folder" $folder.setting $folder.path .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Additions must not replace the chart's own objects. */}}
{{- define "gpumgr.checkExtras" -}}
{{- $own := include "gpumgr.podLabels" . | fromYaml -}}
{{- range $label, $_ := .Values.podLabels -}}
{{- if hasKey $own $label -}}{{- fail (printf "podLabels: %s is given by the chart, which finds its pods by it; leave it out" $label) -}}{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- $places := list -}}
{{- range include "gpumgr.mounts" . | fromYamlArray -}}
{{- $names = append $names .name -}}
{{- $places = append $places .mountPath -}}
{{- end -}}
{{- range .Values.extraVolumes -}}
{{- if has .name $names -}}{{- fail (printf "extraVolumes: the chart has a volume %s already; take another name" .name) -}}{{- end -}}
{{- end -}}
{{- range .Values.extraVolumeMounts -}}
{{- if has (clean .mountPath) $places -}}
{{- fail (printf "extraVolumeMounts: the chart mounts something at %s already; take another place, or change the setting that names it" (clean .mountPath)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
