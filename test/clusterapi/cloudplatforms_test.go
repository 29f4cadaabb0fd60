// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/aws"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit/platformkittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// cloud is an imitation of a cloud's API.
type cloud struct {
	// name is the one in clusterAPI.platform.
	name string
	// env is the environment of the cloud's controller.
	env []string
	// templates are the EK templates whose keys the cloud names.
	templates []string
	// providerID returns the provider ID of an instance by its name.
	providerID func(name string) string
	// launch makes an instance with keys, in the order of templates.
	launch func(t *testing.T, name string, keys []crypto.PublicKey)
}

// servers starts servers with TLS, and returns their URLs and a file with all their CAs.
func servers(t *testing.T, handlers ...http.Handler) (urls []string, caFile string) {
	t.Helper()
	caFile = filepath.Join(t.TempDir(), "ca.crt")
	var bundle []byte
	for _, handler := range handlers {
		server := platformkittest.NewServer(t, handler)
		ca, err := os.ReadFile(server.CAFile)
		if err != nil {
			t.Fatal(err)
		}
		urls, bundle = append(urls, server.URL), append(bundle, ca...)
	}
	mustWrite(t, caFile, string(bundle))
	return urls, caFile
}

// serviceAccountToken imitates the token that the kubelet projects into the controller's pod.
const serviceAccountToken = "header.projected.signature"

func newEC2(t *testing.T) cloud {
	t.Helper()
	const region, role = "eu-west-1", "arn:aws:iam::123456789012:role/node-attestation"
	api := &aws.EC2{AWS: aws.Unserved(), Region: region}
	api.AWS.Trust(role, serviceAccountToken)
	urls, ca := servers(t, api, api.AWS.STS())
	token := filepath.Join(t.TempDir(), "token")
	mustWrite(t, token, serviceAccountToken)
	id := func(name string) string { return fmt.Sprintf("i-%x", sha256.Sum256([]byte(name)))[:19] }
	return cloud{
		name: "ec2", templates: []string{"rsa-2048", "ecc-p384-high"},
		env: []string{
			"AWS_REGION=" + region, "AWS_ENDPOINT_URL_EC2=" + urls[0], "AWS_ENDPOINT_URL_STS=" + urls[1], "AWS_CA_BUNDLE=" + ca,
			"AWS_ROLE_ARN=" + role, "AWS_WEB_IDENTITY_TOKEN_FILE=" + token,
		},
		providerID: func(name string) string { return "aws:///" + region + "a/" + id(name) },
		launch: func(t *testing.T, name string, eks []crypto.PublicKey) {
			keys, err := aws.NitroTPMKeys(eks[0], eks[1])
			if err != nil {
				t.Fatal(err)
			}
			api.Put(aws.EC2Instance{ID: id(name), Zone: region + "a", TPMSupport: "v2.0", Keys: keys})
		},
	}
}

func newGCE(t *testing.T) cloud {
	t.Helper()
	const project, zone = "example-project", "europe-west1-b"
	api := &google.Compute{SubjectToken: serviceAccountToken}
	urls, ca := servers(t, api, api.Tokens())
	dir := t.TempDir()
	token, credential := filepath.Join(dir, "token"), filepath.Join(dir, "credential.json")
	mustWrite(t, token, serviceAccountToken)
	configuration, err := json.Marshal(map[string]any{
		"type": "external_account", "audience": "//iam.googleapis.com/projects/123456789012/locations/global/workloadIdentityPools/management/providers/cluster",
		"subject_token_type": "urn:ietf:params:oauth:token-type:jwt", "token_url": urls[1] + "/v1/token", "credential_source": map[string]any{"file": token},
	})
	if err != nil {
		t.Fatal(err)
	}
	mustWrite(t, credential, string(configuration))
	encode := func(key crypto.PublicKey) string {
		der, err := x509.MarshalPKIXPublicKey(key)
		if err != nil {
			t.Fatal(err)
		}
		return string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
	}
	return cloud{
		name: "gce", templates: []string{"rsa-2048", "ecc-p256"},
		env:        []string{"GCE_PROJECTS=" + project, "GCE_ENDPOINT=" + urls[0], "GCE_CA_FILE=" + ca, "GOOGLE_APPLICATION_CREDENTIALS=" + credential},
		providerID: func(name string) string { return "gce://" + project + "/" + zone + "/" + name },
		launch: func(_ *testing.T, name string, eks []crypto.PublicKey) {
			api.Put(google.ComputeInstance{Project: project, Zone: zone, Name: name, VTPM: new(true), RSA2048: encode(eks[0]), ECCP256: encode(eks[1])})
		},
	}
}

// start builds the cloud's controller, and starts it.
func (c cloud) start(t *testing.T, w *world) {
	t.Helper()
	name := "node-attestation-controller-" + c.name
	binary := filepath.Join(t.TempDir(), name)
	if err := compile.Program(t.Context(), filepath.Join(module, "platforms"), binary, "./"+c.name+"/"+name); err != nil {
		t.Fatal(err)
	}
	w.startPlatform(t, binary, c.name, c.env...)
}

// keys returns the EKs of a computer, in the order of templates.
func (c cloud) keys(t *testing.T, m *computer) (keys []crypto.PublicKey) {
	t.Helper()
	for _, template := range c.templates {
		public, err := m.chip.EK(template)
		if err != nil {
			t.Fatal(err)
		}
		key, err := tpm2.Pub(public)
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, key)
	}
	return keys
}

// on makes the Machine an instance of the cloud, without an EK in an annotation. Its node shows the
// EK of a template.
func (c cloud) on(t *testing.T, template string) func(*machine) {
	return func(m *machine) {
		m.isInstance(c.providerID(m.name))
		m.args = []string{"--ek-template=" + template}
		if at := slices.Index(c.templates, template); at >= 0 {
			ek, err := clusterapi.EKFingerprint(c.keys(t, m.computer)[at])
			if err != nil {
				t.Fatal(err)
			}
			m.ek = ek.String()
		}
	}
}

// A cloud's API names both EKs of an instance's TPM, which has no EK certificate. A node may show
// either. Another instance's TPM is refused, and so is an EK that the cloud does not name.
func TestCloudPlatforms(t *testing.T) {
	t.Parallel()
	for _, newCloud := range []func(*testing.T) cloud{newEC2, newGCE} {
		platform := newCloud(t)
		t.Run(platform.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, shared.management)
			c := w.newCluster(t, platform.name, nil)
			platform.start(t, w)

			for _, template := range platform.templates {
				hardware := newComputerWith(t, swtpm.Options{})
				platform.launch(t, template, platform.keys(t, hardware))
				m := c.newMachineOf(t, hardware, template, platform.on(t, template))
				m.enrols(t)
				m.remembered(t)
			}

			platform.launch(t, "victim", platform.keys(t, newComputerWith(t, swtpm.Options{})))
			impostor := c.newMachineOf(t, newComputerWith(t, swtpm.Options{}), "victim", platform.on(t, platform.templates[0]))
			if r := impostor.run(t); r.Code != 21 || !strings.Contains(r.Stderr, "NodeNameMismatch") {
				t.Errorf("with the TPM of another machine: exit code %d: %s", r.Code, r.Stderr)
			}
			hardware := newComputerWith(t, swtpm.Options{})
			platform.launch(t, "other-key", platform.keys(t, hardware))
			other := c.newMachineOf(t, hardware, "other-key", platform.on(t, "rsa-2048-high"))
			if r := other.run(t); r.Code != 21 || !strings.Contains(r.Stderr, "NodeNameMismatch") {
				t.Errorf("with an EK that the cloud does not name: exit code %d: %s", r.Code, r.Stderr)
			}
		})
	}
}
