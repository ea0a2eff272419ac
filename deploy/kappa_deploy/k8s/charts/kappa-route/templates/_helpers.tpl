{{- define "kappa-route.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "kappa-route.selector" -}}
app.kubernetes.io/name: kappa-route
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kappa-route.metadata" -}}
name: {{ include "kappa-route.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "kappa-route.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Whether replicas tell each other what they have in flight, by a headless Service of their own. */ -}}
{{- define "kappa-route.peers" -}}
{{- $keys := or (not .Values.keysSecret) (dig "peers" "key_env" "" .Values.config) }}
{{- $given := or (dig "peers" "urls" nil .Values.config) (dig "http" "tls" nil .Values.config) }}
{{- if and (gt (int .Values.replicas) 1) $keys (not $given) }}true{{ end }}
{{- end }}

{{- /* route.yaml: the given settings, where it listens, and the keys of the Secret. */ -}}
{{- define "kappa-route.config" -}}
{{- $made := dict "http" (dict "host" "0.0.0.0" "port" 8000) }}
{{- if .Values.keysSecret }}
{{- $_ := set $made "tenants" (dict "keys_file" "/etc/kappa/keys/keys.yaml") }}
{{- else if not (dig "access" "allow_open" false .Values.config) }}
{{- fail "name a Secret with keys in keysSecret, or say config.access.allow_open: true" }}
{{- end }}
{{- if include "kappa-route.peers" . }}
{{- $_ := set $made "peers" (dict "urls" (list (printf "http://%s-peers.%s:8000" (include "kappa-route.name" .) .Release.Namespace))) }}
{{- end }}
{{- merge $made (deepCopy .Values.config) (dict "tenants" (dict "unknown" (ternary "refuse" "default" (ne .Values.keysSecret "")))) | toYaml }}
{{- end }}
