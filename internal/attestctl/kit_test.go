// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"flag"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

var update = flag.Bool("update", false, "write the golden files")

// now is the time of all tests.
var now = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

func before(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// keyOf returns the same key for the same number.
func keyOf(n byte) *ecdsa.PrivateKey {
	return must(ecdsa.ParseRawPrivateKey(elliptic.P256(), bytes.Repeat([]byte{n}, 32)))
}

// ekOf returns the fingerprint of the EK of a hello.
func ekOf(n byte) string {
	return tpm.FingerprintOf(must(x509.MarshalPKIXPublicKey(keyOf(n).Public()))).String()
}

// newHello is a hello with the EK of that number. With an issuer it has an EK certificate.
func newHello(name, node, providerID string, ek byte, issuer string) *certificatesv1.CertificateSigningRequest {
	return helloFor(tpmSigner, name, node, providerID, ek, issuer)
}

// helloFor is a hello whose proof will ask a signer.
func helloFor(signer, name, node, providerID string, ek byte, issuer string) *certificatesv1.CertificateSigningRequest {
	t := template.EKs()[0]
	public := must(t.PublicArea(keyOf(ek).Public()))
	ak := template.AK()
	ak.Unique = public.Unique
	hello := attestation.Hello{
		Version: attestation.VersionTPM, Versions: attestation.Versions{attestation.VersionTPM}, SignerName: signer,
		EKTemplate: t.Name, EKPublic: tpm2.Marshal(public), AKPublic: tpm2.Marshal(ak),
	}
	if issuer != "" {
		hello.EKCertificates = [][]byte{ekCertificate(ek, issuer)}
	}
	return request(name, attestation.HelloSignerFor(signer), node, providerID, must(hello.Marshal()))
}

// ekCertificate is the same for the same arguments but for its signature.
func ekCertificate(ek byte, issuer string) []byte {
	parent := &x509.Certificate{Subject: pkix.Name{CommonName: issuer}, SerialNumber: big.NewInt(1)}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: now, NotAfter: now.Add(time.Hour)}
	return must(x509.CreateCertificate(rand.Reader, leaf, parent, keyOf(ek).Public(), keyOf(200)))
}

func request(name, signer, node, providerID string, document []byte) *certificatesv1.CertificateSigningRequest {
	// csr.PKCS10 refuses a provider ID that an attacker's own program does not
	template := &x509.CertificateRequest{Subject: pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:" + node}}
	if providerID != "" {
		template.ExtraExtensions = []pkix.Extension{{Id: csr.ProviderIDOID, Value: must(asn1.MarshalWithParams(providerID, "utf8"))}}
	}
	der := must(x509.CreateCertificateRequest(rand.Reader, template, keyOf(100)))
	content := must(attestation.Request{PKCS10: der, Provider: tpm.Provider, Data: document}.Marshal())
	object := csr.Object(name, signer, content, keyOf(100).Public(), nil)
	object.UID, object.CreationTimestamp = types.UID("uid-"+name), before(5*time.Minute)
	object.Spec.Username = "system:bootstrap:abcdef"
	return object
}

func waits(object *certificatesv1.CertificateSigningRequest, reason, text string) *certificatesv1.CertificateSigningRequest {
	metav1.SetMetaDataAnnotation(&object.ObjectMeta, attestation.AnnotationWaiting, attestation.Statement{Reason: reason, Text: text}.String())
	return object
}

func ends(object *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType, reason, message string) *certificatesv1.CertificateSigningRequest {
	object.Status.Conditions = append(object.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: kind, Status: corev1.ConditionTrue, Reason: reason, Message: message, LastUpdateTime: before(4 * time.Minute),
	})
	return object
}

func newRecord(node string, ek byte) *v1alpha1.NodeAttestation {
	attested := before(3 * time.Hour)
	return &v1alpha1.NodeAttestation{
		ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: node, UID: types.UID("uid-" + node), CreationTimestamp: before(50 * time.Hour)},
		Spec: v1alpha1.NodeAttestationSpec{
			Cluster: "c", NodeName: node, Provider: "tpm", ProviderID: "metal://" + node,
			Machine: v1alpha1.MachineReference{Source: "inventory", Name: "rack-" + node},
			EK:      &v1alpha1.EndorsementKey{Fingerprint: ekOf(ek), Template: "ecc-p256", Source: "Inventory"},
		},
		Status: v1alpha1.NodeAttestationStatus{
			LastAttested: &attested,
			Certificates: []v1alpha1.IssuedCertificate{{SHA256: strings.Repeat("ab", 32), NotAfter: before(-21 * time.Hour), RequestUID: "u"}},
		},
	}
}

func newEventOn(kind, name, reason, note string, ago time.Duration) *eventsv1.Event {
	return &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{Namespace: clusterEvents, Name: fmt.Sprintf("%s.%s.%d", name, strings.ToLower(reason), ago)},
		EventTime:           metav1.NewMicroTime(now.Add(-ago)),
		ReportingController: telemetry.Component, Reason: reason, Note: note, Regarding: corev1.ObjectReference{Kind: kind, Name: name},
	}
}

// result is what a command printed.
type result struct {
	code           int
	stdout, stderr string
}

// newAccess returns access to a cluster that has these objects.
func newAccess(t *testing.T, objects ...client.Object) *access {
	t.Helper()
	c := fake.NewClientBuilder().WithScheme(must(newScheme())).WithObjects(objects...).
		WithIndex(&certificatesv1.CertificateSigningRequest{}, "spec.signerName", func(o client.Object) []string {
			return []string{o.(*certificatesv1.CertificateSigningRequest).Spec.SignerName}
		}).
		WithIndex(&eventsv1.Event{}, "reportingController", func(o client.Object) []string { return []string{o.(*eventsv1.Event).ReportingController} }).
		WithIndex(&v1alpha1.NodeAttestation{}, v1alpha1.FieldNodeName, func(o client.Object) []string { return []string{o.(*v1alpha1.NodeAttestation).Spec.NodeName} }).
		WithIndex(&v1alpha1.RevocationSlice{}, v1alpha1.FieldCluster, func(o client.Object) []string { return []string{o.(*v1alpha1.RevocationSlice).Spec.Cluster} }).
		WithIndex(&corev1.Pod{}, fieldPodNode, func(o client.Object) []string { return []string{o.(*corev1.Pod).Spec.NodeName} }).
		Build()
	return &access{records: c, nodes: c, namespace: defaultNamespace, controllerNamespace: defaultNamespace}
}

// run runs a command on a cluster.
func run(t *testing.T, a *access, args ...string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	program := Program{Version: "v0.0.0-test", Commit: "unknown", access: a, now: func() time.Time { return now }}
	code := program.Run(t.Context(), Process{
		Args: args, Stdin: strings.NewReader("yes\n"), Stdout: &stdout, Stderr: &stderr, Getenv: func(string) string { return "" },
	})
	return result{code, stdout.String(), stderr.String()}
}

// wantGolden compares with a golden file.
func wantGolden(t *testing.T, name string, r result) {
	t.Helper()
	got := fmt.Sprintf("exit code %d\n--- standard output\n%s--- standard error\n%s", r.code, r.stdout, r.stderr)
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: see go test -run %s -update. Got:\n%s", path, t.Name(), got)
	}
}

// want checks exit code and output of a command.
func (r result) want(t *testing.T, code int, says ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("exit code %d, not %d", r.code, code)
	}
	for _, s := range says {
		if !strings.Contains(r.stdout+r.stderr, s) {
			t.Errorf("does not say %q", s)
		}
	}
	if t.Failed() {
		t.Logf("%s\n%s", r.stdout, r.stderr)
	}
}
