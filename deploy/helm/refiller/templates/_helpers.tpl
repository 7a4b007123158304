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

{{- /* The configuration that replicas get: config, with the version that versionFrom says. */ -}}
{{- define "refiller.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if eq .Values.versionFrom "release" -}}
{{- if ne (int64 $config.version) 1 -}}
{{- fail "versionFrom is release, so config.version has no meaning: leave it out" -}}
{{- end -}}
{{- if and $config.pools (not (hasKey $config "pools_version")) -}}
{{- fail "versionFrom is release: give the pools a config.pools_version, since all regions have to agree on their version, and each has revisions of its own" -}}
{{- end -}}
{{- $_ := set $config "version" (add .Values.versionBase .Release.Revision) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{- /* Fails if an address has a password: it would be readable in a ConfigMap. dict "field" "config.redis.url" "text" … "secret" "redis" */ -}}
{{- define "refiller.noPassword" -}}
{{- if regexMatch "://[^/@]*:[^/@]*@" (toString .text) -}}
{{- fail (printf "%s has a password, which would be readable in a ConfigMap: put it into a Secret, name that in secrets.%s, and the file of the password in the configuration (password_file)" .field .secret) -}}
{{- end -}}
{{- end -}}

{{- /* The value of a variable of the container: what extraEnv says, "?" if that comes from elsewhere. dict "env" .Values.extraEnv "name" … */ -}}
{{- define "refiller.variable" -}}
{{- range .env -}}
{{- if eq .name $.name -}}{{- if hasKey . "value" -}}{{ .value }}{{- else -}}?{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The ports of an address, or of several with commas between: dict "url" … "port" "6379", its default. */ -}}
{{- define "refiller.portsOf" -}}
{{- $ports := list -}}
{{- if not (hasPrefix "unix://" .url) -}}
{{- range splitList "," .url -}}
{{- $host := regexReplaceAll "^[A-Za-z-]+://" . "" -}}
{{- $host = regexReplaceAll "[/?#].*$" $host "" -}}
{{- $host = regexReplaceAll "^.*@" $host "" -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" $host | trimPrefix ":" | default $.port) -}}
{{- end -}}
{{- end -}}
{{- join "," $ports -}}
{{- end -}}

{{- /* The ports that a network policy opens, with commas between: the ones given, which have to have those of the addresses,
or these alone. dict "field" "redisPorts" "given" .Values.networkPolicy.redisPorts "ports" "6379" "of" "config.redis.url" */ -}}
{{- define "refiller.opened" -}}
{{- $needed := without (splitList "," .ports | uniq) "" -}}
{{- if .given -}}
{{- range $needed -}}
{{- if not (has . (toStrings $.given)) -}}
{{- fail (printf "networkPolicy.%s lacks %s, a port of %s" $.field . $.of) -}}
{{- end -}}
{{- end -}}
{{- join "," .given -}}
{{- else -}}
{{- join "," $needed -}}
{{- end -}}
{{- end -}}

{{- /* The ports of Redis, for a container with the variables env. A sentinel names masters, whose ports the configuration
doesn't have: 6379, or those given. dict "top" . "env" .Values.extraEnv */ -}}
{{- define "refiller.redisPorts" -}}
{{- $given := .top.Values.networkPolicy.redisPorts -}}
{{- $url := include "refiller.variable" (dict "env" .env "name" "REFILLER_REDIS_URL") | default (default dict .top.Values.config.redis).url | default "" -}}
{{- if and (eq $url "?") (not $given) -}}
{{- fail "networkPolicy.redisPorts: name the ports of Redis, since REFILLER_REDIS_URL isn't readable here" -}}
{{- end -}}
{{- $ports := "" -}}
{{- if regexMatch "^rediss?-sentinel://" $url -}}
{{- $ports = include "refiller.portsOf" (dict "url" $url "port" "26379") -}}
{{- if not $given -}}{{- $ports = print $ports ",6379" -}}{{- end -}}
{{- else if ne $url "?" -}}
{{- $ports = include "refiller.portsOf" (dict "url" $url "port" "6379") -}}
{{- end -}}
{{- include "refiller.opened" (dict "field" "redisPorts" "given" $given "ports" $ports "of" "Redis' address") -}}
{{- end -}}

{{- /* The ports of etcd; nothing if no etcd is named. */ -}}
{{- define "refiller.etcdPorts" -}}
{{- $config := .Values.config -}}
{{- $given := .Values.networkPolicy.etcdPorts -}}
{{- $election := default dict $config.election -}}
{{- $endpoints := concat (default list $election.endpoints) (default list (default dict $config.pool_registry).endpoints) -}}
{{- $hidden := false -}}
{{- range $name := list "REFILLER_ETCD_ENDPOINTS" "REFILLER_POOL_REGISTRY_ENDPOINTS" -}}
{{- $value := include "refiller.variable" (dict "env" $.Values.extraEnv "name" $name) -}}
{{- if eq $value "?" -}}
{{- $hidden = true -}}
{{- else if $value -}}
{{- $endpoints = concat $endpoints (splitList "," $value) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (default "race" $election.mode) "etcd") (not $endpoints) -}}{{- $hidden = true -}}{{- end -}}
{{- if and $hidden (not $given) -}}
{{- fail "networkPolicy.etcdPorts: name the ports of etcd, since its endpoints aren't readable here" -}}
{{- end -}}
{{- if or $endpoints $given -}}
{{- $ports := include "refiller.portsOf" (dict "url" (join "," $endpoints) "port" "2379") -}}
{{- if not $endpoints -}}{{- $ports = "" -}}{{- end -}}
{{- include "refiller.opened" (dict "field" "etcdPorts" "given" $given "ports" $ports "of" "etcd's endpoints") -}}
{{- end -}}
{{- end -}}

{{- /* A list of ports of a network policy. */ -}}
{{- define "refiller.portList" -}}
{{- range splitList "," . }}
- {port: {{ . }}}
{{- end }}
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

{{- /* The variables of refiller's container. */ -}}
{{- define "refiller.env" -}}
- name: REFILLER_IDENTITY
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- {name: GOMEMLIMIT, value: {{ .Values.memoryLimit | quote }}}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The files of refiller's container. */ -}}
{{- define "refiller.volumeMounts" -}}
# A directory: Kubernetes never updates a subPath.
- {name: config, mountPath: /etc/refiller, readOnly: true}
{{- range $name, $secret := .Values.secrets }}
{{- if $secret }}
- {name: {{ $name }}, mountPath: /var/run/secrets/refiller/{{ $name }}, readOnly: true}
{{- end }}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* And where they come from: dict "top" . "config" the name of the ConfigMap. */ -}}
{{- define "refiller.volumes" -}}
- name: config
  configMap: {name: {{ .config }}}
{{- range $name, $secret := .top.Values.secrets }}
{{- if $secret }}
- name: {{ $name }}
  secret: {secretName: {{ $secret }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- with .top.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
