// SPDX-License-Identifier: Apache-2.0

package policyset

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"fmt"
	"path"
	"regexp"

	"sigs.k8s.io/yaml"
)

// Names of the files of the static form, in its folder. The API server reads every file in the
// folder of PoliciesFile.
const (
	PoliciesFile            = "policies/node-attestation.yaml"
	AdmissionFile           = "admission.yaml"
	KubeadmFile             = "kubeadm.yaml"
	KubeadmControlPlaneFile = "kubeadmcontrolplane.yaml"
)

// Mark begins each of these files.
const Mark = "# Made by \"node-attestation-controller policies\": do not edit, but run it again.\n"

// maxInlineFile is the maximum length of a file's content in a KubeadmControlPlane.
const maxInlineFile = 10240

// hostPath is an absolute path that needs no quotes in a manifest.
var hostPath = regexp.MustCompile(`^(/[-A-Za-z0-9._]+)+$`)

// RenderFiles returns the files of the static form by their names. at is the folder's path on each
// node of the control plane, and in the API server's container.
func RenderFiles(o Options, at string) (map[string][]byte, error) {
	if !hostPath.MatchString(at) || path.Clean(at) != at {
		return nil, fmt.Errorf("path %.128q: must be the absolute path of a folder", at)
	}
	policies, err := RenderStatic(o)
	if err != nil {
		return nil, err
	}
	admission, err := document("An API server reads it with --admission-control-config-file. If you have such a file, add the plugin to yours.", map[string]any{
		"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration",
		"plugins": []any{map[string]any{"name": "ValidatingAdmissionPolicy", "configuration": map[string]any{
			"apiVersion": "apiserver.config.k8s.io/v1", "kind": "ValidatingAdmissionPolicyConfiguration",
			"staticManifestsDir": path.Join(at, path.Dir(PoliciesFile)),
		}}},
	})
	if err != nil {
		return nil, err
	}
	apiServer := map[string]any{
		"extraArgs": []any{map[string]any{"name": "admission-control-config-file", "value": path.Join(at, AdmissionFile)}},
		// The folder and not its files: a mounted file would stay the old one when it is replaced.
		"extraVolumes": []any{map[string]any{"name": "node-attestation", "hostPath": at, "mountPath": at, "readOnly": true, "pathType": "Directory"}},
	}
	kubeadm, err := document("For kubeadm: add these entries to your ClusterConfiguration.", map[string]any{
		"apiVersion": "kubeadm.k8s.io/v1beta4", "kind": "ClusterConfiguration", "apiServer": apiServer,
	})
	if err != nil {
		return nil, err
	}
	packed, err := pack(policies)
	if err != nil {
		return nil, err
	}
	file := func(name string, fields map[string]any) map[string]any {
		fields["path"], fields["owner"], fields["permissions"] = path.Join(at, name), "root:root", "0644"
		return fields
	}
	controlPlane, err := document("For Cluster API: add these entries to your KubeadmControlPlane. The packed file is "+PoliciesFile+".", map[string]any{
		"apiVersion": "controlplane.cluster.x-k8s.io/v1beta2", "kind": "KubeadmControlPlane", "metadata": map[string]any{"name": "your-control-plane"},
		"spec": map[string]any{"kubeadmConfigSpec": map[string]any{
			"clusterConfiguration": map[string]any{"apiServer": apiServer},
			"files": []any{
				file(AdmissionFile, map[string]any{"content": string(admission)}),
				file(PoliciesFile, map[string]any{"encoding": "gzip+base64", "content": packed}),
			},
		}},
	})
	if err != nil {
		return nil, err
	}
	return map[string][]byte{PoliciesFile: policies, AdmissionFile: admission, KubeadmFile: kubeadm, KubeadmControlPlaneFile: controlPlane}, nil
}

// document returns an object in YAML, after Mark and a line for the reader.
func document(forReader string, object any) ([]byte, error) {
	content, err := yaml.Marshal(object)
	return append([]byte(Mark+"# "+forReader+"\n"), content...), err
}

// pack returns a file's content so that it fits into a KubeadmControlPlane.
func pack(content []byte) (string, error) {
	var packed bytes.Buffer
	writer, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return "", err
	}
	_, err = writer.Write(content)
	if err := errors.Join(err, writer.Close()); err != nil {
		return "", err
	}
	inline := base64.StdEncoding.EncodeToString(packed.Bytes())
	if len(inline) > maxInlineFile {
		return "", fmt.Errorf("%s has %d bytes when it is packed, and a KubeadmControlPlane takes %d: name fewer signers and users", PoliciesFile, len(inline), maxInlineFile)
	}
	return inline, nil
}
