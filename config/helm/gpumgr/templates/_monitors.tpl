{{/* The endpoint of a PodMonitor and a ServiceMonitor: (list . values). */}}
{{- define "gpumgr.endpoint" -}}
{{- $root := index . 0 -}}
port: metrics
path: /metrics
interval: {{ (index . 1).interval }}
scheme: {{ include "gpumgr.scheme" $root | lower }}
{{- if eq (include "gpumgr.scheme" $root) "HTTPS" }}
tlsConfig:
  # Pods are scraped by their address, which no certificate names.
  insecureSkipVerify: true
{{- end }}
{{- with $root.Values.http.tokenSecret }}
authorization:
  credentials:
    name: {{ . }}
    key: token
{{- end }}
relabelings:
  # The rules and the dashboard call a node by its instance.
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
{{- end -}}
