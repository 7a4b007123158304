{{- define "refiller.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "refiller.serviceAccountName" -}}
{{- default (ternary (include "refiller.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- /* Labels of all objects. */ -}}
{{- define "refiller.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- /* Labels by which the pods of a component are found: dict "top" . "component" "refiller". */ -}}
{{- define "refiller.selector" -}}
app.kubernetes.io/name: {{ default .top.Chart.Name .top.Values.nameOverride }}
app.kubernetes.io/instance: {{ .top.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "refiller.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What the pods of both programs have in common: dict "top" . "component" "refiller" "pod" .Values */ -}}
{{- define "refiller.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
serviceAccountName: {{ include "refiller.serviceAccountName" .top }}
{{- with .top.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
{{- with index $.pod $field }}
{{ $field }}: {{ if kindIs "string" . }}{{ . }}{{ else }}{{- toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
topologySpreadConstraints:
  {{- range $key, $place := dict "kubernetes.io/hostname" "node" "topology.kubernetes.io/zone" "zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: {{ index $.top.Values.whenUnsatisfiable $place }}
    labelSelector:
      matchLabels: {{- include "refiller.selector" $ | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
  {{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- /* What their containers have in common. */ -}}
{{- define "refiller.container" -}}
image: {{ include "refiller.image" .top }}
{{- with .top.Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
resources: {{- toYaml .pod.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Whether a configuration names an etcd: the string "true", or nothing. */ -}}
{{- define "refiller.etcd" -}}
{{- $config := .Values.config -}}
{{- $election := default dict $config.election -}}
{{- if or (eq (default "race" $election.mode) "etcd") $election.endpoints $config.pool_registry .Values.secrets.etcd -}}true{{- end -}}
{{- end -}}

{{- /* The variables of Redis for a program that has no configuration file, from config.redis. */ -}}
{{- define "refiller.redisEnv" -}}
{{- $redis := default dict .Values.config.redis -}}
{{- $tls := default dict $redis.tls -}}
{{- range $name, $value := dict
  "URL" $redis.url "USERNAME" $redis.username "PASSWORD_FILE" $redis.password_file
  "SENTINEL_USERNAME" $redis.sentinel_username "SENTINEL_PASSWORD_FILE" $redis.sentinel_password_file
  "CA" $tls.ca "CERT" $tls.cert "KEY" $tls.key }}
{{- with $value }}
- {name: REFILLER_REDIS_{{ $name }}, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- end -}}
