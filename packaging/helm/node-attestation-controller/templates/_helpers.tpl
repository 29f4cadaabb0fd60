{{/*
The objects come from files/: `make generate` copies them from packaging/. The templates select objects, and apply the values to them.
*/}}

{{- define "nac.namespace" -}}node-attestation-system{{- end -}}

{{/* nac.documents (list ROOT FILE): the objects of a file, as a JSON array. */}}
{{- define "nac.documents" -}}
{{- $root := index . 0 -}}
{{- $path := printf "files/%s" (index . 1) -}}
{{- $objects := list -}}
{{- range regexSplit "(?m)^---$" (required (printf "the chart has no file %s" $path) ($root.Files.Get $path)) -1 -}}
  {{- $object := fromYaml . -}}
  {{- if hasKey $object "Error" -}}{{- fail (printf "%s: %s" $path $object.Error) -}}{{- end -}}
  {{- if $object.kind -}}{{- $objects = append $objects $object -}}{{- end -}}
{{- end -}}
{{- toJson $objects -}}
{{- end -}}

{{/* nac.inMode (list ROOT OBJECT): "true" if the mode has an object of packaging/kubernetes. The kustomizations select by the same label. */}}
{{- define "nac.inMode" -}}
{{- $root := index . 0 -}}
{{- $scope := dig "labels" "attestation.cluster.x-k8s.io/cluster-api" "" (index . 1).metadata -}}
{{- if or (eq $root.Values.mode "standalone") (has $scope (list "management" "both")) -}}true{{- end -}}
{{- end -}}

{{- define "nac.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: node-attestation-controller
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* nac.object (list ROOT OBJECT): prints an object, with the labels and annotations that all objects have. */}}
{{- define "nac.object" -}}
{{- $root := index . 0 -}}
{{- $object := index . 1 -}}
{{- $metadata := $object.metadata -}}
{{- $labels := merge (dict) ($metadata.labels | default dict) (include "nac.labels" $root | fromYaml) $root.Values.labels -}}
{{- $_ := set $metadata "labels" $labels -}}
{{- with merge (dict) ($metadata.annotations | default dict) $root.Values.annotations -}}
  {{- $_ := set $metadata "annotations" . -}}
{{- end }}
---
{{ toYaml $object }}
{{- end -}}

{{/* nac.customSigners: signers of the configuration, as a JSON array. nac.issuers: those of cert-manager among them. */}}
{{- define "nac.customSigners" -}}
{{- $names := list -}}
{{- range .Values.configuration.signers -}}{{- $names = append $names .name -}}{{- end -}}
{{- toJson $names -}}
{{- end -}}
{{- define "nac.issuers" -}}
{{- $names := list -}}
{{- range include "nac.customSigners" . | fromJsonArray -}}
  {{- if regexMatch "^(cluster)?issuers\\.cert-manager\\.io/" . -}}{{- $names = append $names . -}}{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/*
nac.extend (list POLICY VARIABLE NAMES): adds names to a list of literals in a policy. 'CORP\new' would be another name there, with a line break, and a quote
would end the literal.
*/}}
{{- define "nac.extend" -}}
{{- $variable := index . 1 -}}
{{- $names := index . 2 -}}
{{- range (index . 0).spec.variables -}}
  {{- if and $names (eq .name $variable) -}}
    {{- $literals := regexFindAll "'[^']*'" .expression -1 -}}
    {{- range $names -}}
      {{- if not (regexMatch "^[^'\"\\\\[:cntrl:]]+$" .) -}}{{- fail (printf "%q cannot be a name in a policy: it has a quote, a backslash or a control character" .) -}}{{- end -}}
      {{- $literals = append $literals (squote .) -}}
    {{- end -}}
    {{- $_ := set . "expression" (printf "[%s]" (uniq $literals | join ", ")) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* nac.policy (list ROOT POLICY): adds controllers, signers and users of the configuration to the policy's lists. */}}
{{- define "nac.policy" -}}
{{- $root := index . 0 -}}
{{- $policy := index . 1 -}}
{{- $configuration := $root.Values.configuration -}}
{{- $name := trimPrefix "node-attestation-" $policy.metadata.name -}}
{{- $signers := include "nac.customSigners" $root | fromJsonArray -}}
{{- include "nac.extend" (list $policy "controllers" (dig "policies" "controllers" list $configuration)) -}}
{{- if has $name (list "approval" "size" "metadata" "signers") -}}
  {{- include "nac.extend" (list $policy "signers" $signers) -}}
{{- end -}}
{{- if and (eq $name "certificates") (eq (dig "signing" "mode" "" $configuration) "Sign") -}}
  {{- include "nac.extend" (list $policy "signers" $signers) -}}
{{- end -}}
{{- if has $name (list "size" "metadata" "signers") -}}
  {{- include "nac.extend" (list $policy "signers" $root.Values.policies.machineSigners) -}}
  {{- $users := list -}}
  {{- range $configuration.bootstrappers -}}{{- $users = append $users .username -}}{{- end -}}
  {{- include "nac.extend" (list $policy "bootstrappers" $users) -}}
{{- end -}}
{{- if has $name (list "records" "revocation-slices") -}}
  {{- include "nac.extend" (list $policy "movers" $root.Values.policies.movers) -}}
{{- end -}}
{{- end -}}

{{/* nac.role (list ROOT ROLE): puts the configuration's Secret and ConfigMaps into the Role's resourceNames. */}}
{{- define "nac.role" -}}
{{- $configuration := (index . 0).Values.configuration -}}
{{- $inventories := list -}}
{{- with dig "inventory" "configMap" "name" "" $configuration -}}{{- $inventories = append $inventories . -}}{{- end -}}
{{- range dig "inventory" "configMaps" list $configuration -}}{{- $inventories = append $inventories .name -}}{{- end -}}
{{- $given := dict -}}
{{- with $inventories -}}{{- $_ := set $given "node-attestation-inventory" (uniq .) -}}{{- end -}}
{{- with dig "signing" "secretName" "" $configuration -}}{{- $_ := set $given "node-attestation-ca" (list .) -}}{{- end -}}
{{- range (index . 1).rules -}}
  {{- if .resourceNames -}}
    {{- $names := list -}}
    {{- range .resourceNames -}}{{- $names = concat $names (get $given . | default (list .)) -}}{{- end -}}
    {{- $_ := set . "resourceNames" $names -}}
  {{- end -}}
{{- end -}}
{{- end -}}
