// SPDX-License-Identifier: Apache-2.0

package policyset

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"io"
	"strings"
	"testing"

	controlplanev1 "sigs.k8s.io/cluster-api/api/controlplane/kubeadm/v1beta2"
	"sigs.k8s.io/yaml"
)

// The KubeadmControlPlane's patch has the fields of Cluster API's type, and brings the same files
// that the other patches name. test/static has kubeadm check its patch.
func TestKubeadmControlPlaneFile(t *testing.T) {
	for _, scope := range []Scope{Alone, Workload, Management} {
		files, err := RenderFiles(Options{Scope: scope, Controllers: []string{shipped}, Revocation: true}, "/etc/policies")
		if err != nil {
			t.Fatal(err)
		}
		var patch controlplanev1.KubeadmControlPlane
		if err := yaml.UnmarshalStrict(files[KubeadmControlPlaneFile], &patch); err != nil {
			t.Fatal(err)
		}
		spec := patch.Spec.KubeadmConfigSpec
		args, volumes := spec.ClusterConfiguration.APIServer.ExtraArgs, spec.ClusterConfiguration.APIServer.ExtraVolumes
		if len(args) != 1 || *args[0].Value != "/etc/policies/admission.yaml" || len(volumes) != 1 || volumes[0].HostPath != "/etc/policies" {
			t.Errorf("%s: %v, %v", scope, args, volumes)
		}
		if len(spec.Files) != 2 || spec.Files[0].Path != *args[0].Value || spec.Files[0].Content != string(files[AdmissionFile]) ||
			spec.Files[1].Path != "/etc/policies/"+PoliciesFile || spec.Files[1].Encoding != "gzip+base64" {
			t.Fatalf("%s: %v", scope, spec.Files)
		}
		packed, err := gzip.NewReader(base64.NewDecoder(base64.StdEncoding, strings.NewReader(spec.Files[1].Content)))
		if err != nil {
			t.Fatal(err)
		}
		if unpacked, err := io.ReadAll(packed); err != nil || !bytes.Equal(unpacked, files[PoliciesFile]) {
			t.Errorf("%s: the packed file is another: %v", scope, err)
		}
		for name, content := range files {
			if !bytes.HasPrefix(content, []byte(Mark)) {
				t.Errorf("%s has no mark", name)
			}
		}
	}
}
