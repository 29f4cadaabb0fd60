// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/watch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const kubeletSigner = certificatesv1.KubeAPIServerClientKubeletSignerName

// counters are registered once in a process.
var counters = sync.OnceValues(telemetry.NewMetrics)

// files files a request with a credential, as a kubelet does.
func (f *fleet) files(t *testing.T, credential *rest.Config, signer, node string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	api, err := kubernetes.NewForConfig(credential)
	if err != nil {
		t.Fatal(err)
	}
	request := csrObject(t, signer, node)
	if signer == certificatesv1.KubeletServingSignerName {
		request.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	}
	if request, err = api.CertificatesV1().CertificateSigningRequests().Create(t.Context(), request, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return request
}

// approvedByHand approves a request as an administrator.
func (f *fleet) approvedByHand(t *testing.T, request *certificatesv1.CertificateSigningRequest) {
	t.Helper()
	request.Status.Conditions = append(request.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: "True", Reason: "KubectlApprove",
	})
	if err := f.client.SubResource("approval").Update(t.Context(), request); err != nil {
		t.Fatal(err)
	}
}

// comesThrough waits until another signer has issued the certificate.
func (f *fleet) comesThrough(t *testing.T, request *certificatesv1.CertificateSigningRequest) {
	t.Helper()
	harness.Eventually(t, harness.Soon, "kube-controller-manager issues for "+request.Name, func() bool {
		return len(f.get(t, request.Name).Status.Certificate) > 0
	})
}

// isReported waits until a request is reported by annotation and Event. It returns the Event's
// note.
func (f *fleet) isReported(t *testing.T, request *certificatesv1.CertificateSigningRequest) (note string) {
	t.Helper()
	harness.Eventually(t, harness.Soon, "it is reported: "+request.Name, func() bool {
		notes := f.eventsAbout(t, request.Name, watch.ReasonIssuedWithoutAttestation)
		if len(notes) == 0 || f.get(t, request.Name).Annotations[intake.AnnotationIssuedWithoutAttestation] == "" {
			return false
		}
		note = notes[0]
		return true
	})
	return note
}

func (f *fleet) around(t *testing.T, name string) float64 {
	t.Helper()
	return sampled(t, "node_attestation_issued_without_attestation_total", map[string]string{"cluster": f.namespace, "name": name})
}

// A certificate that kube-controller-manager issues to a node or a bootstrap token is reported
// once, over restarts and in each replica. No other certificate is reported.
func TestIssuedAround(t *testing.T) {
	counted, err := counters()
	if err != nil {
		t.Fatal(err)
	}
	f := newFleet(t, func(f *fleet, p *verifier.Policy) {
		p.UnattestedNodes = []string{"left-alone"}
		f.config.Metrics = counted.For(f.namespace)
	})
	f.kubeadms(t)
	m := f.newMachine(t, "attested")
	f.inventoried(t, m)
	renews := m.attested(t) // our own, by bootstrap token
	if err := f.StartControllerManager(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.StopControllerManager(); err != nil {
			t.Error(err)
		}
	})
	_, own := renews.attests(t) // and as a node
	f.issued(t, own, m.name)

	bare := f.files(t, f.asToken(m.token), kubeletSigner, "bare")
	f.comesThrough(t, bare)
	if note := f.isReported(t, bare); !strings.Contains(note, "system:node:bare") || !strings.Contains(note, kubeletSigner) || strings.HasPrefix(note, "the node name") {
		t.Errorf("the Event says %q", note)
	}
	// A kubelet that rotates by itself, under a name that has a record.
	certificate := f.issued(t, own, m.name)
	rotated := f.files(t, f.asNode(certificate, renews.keyPEM), kubeletSigner, m.name)
	f.comesThrough(t, rotated)
	if note := f.isReported(t, rotated); !strings.HasPrefix(note, "the node name "+m.name+" has a record, of machine "+m.name) {
		t.Errorf("the Event says %q", note)
	}
	// Another signer, whose requests the cache does not keep.
	another := f.files(t, f.asToken(m.token), certificatesv1.KubeAPIServerClientSignerName, "victim")
	f.approvedByHand(t, another)
	f.comesThrough(t, another)
	f.isReported(t, another)
	// Not reported: a serving certificate, and one for a user who is neither a node nor a
	// bootstrap identity.
	serving := f.files(t, f.asNode(certificate, renews.keyPEM), certificatesv1.KubeletServingSignerName, m.name)
	f.approvedByHand(t, serving)
	f.comesThrough(t, serving)
	admins := f.files(t, f.AdminConfig(), certificatesv1.KubeAPIServerClientSignerName, "admins")
	f.approvedByHand(t, admins)
	f.comesThrough(t, admins)
	// The certificate of an unattested node is counted.
	pair, err := f.ClientCA().IssueClient("system:node:left-alone", []string{"system:nodes"}, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	alone := f.files(t, f.asNode(pair.CertPEM, pair.KeyPEM), kubeletSigner, "left-alone")
	f.comesThrough(t, alone)
	harness.Eventually(t, harness.Soon, "a node that is left alone is counted", func() bool { return f.around(t, "unattested") == 1 })

	// Another leader, and two at once, start with all existing requests. They handle a new request
	// after those.
	f.stop()
	f.start(t)
	f.startWith(t, f.AdminConfig())
	last := f.files(t, f.asToken(m.token), kubeletSigner, "last")
	f.comesThrough(t, last)
	f.isReported(t, last)
	time.Sleep(time.Second) // no second Event may come
	for _, r := range []*certificatesv1.CertificateSigningRequest{bare, rotated, another, last} {
		if notes := f.eventsAbout(t, r.Name, watch.ReasonIssuedWithoutAttestation); len(notes) != 1 {
			t.Errorf("%s: %d Events: %q", r.Name, len(notes), notes)
		}
	}
	reported := []string{bare.Name, rotated.Name, another.Name, last.Name}
	for _, r := range f.all(t) {
		if marked := r.Annotations[intake.AnnotationIssuedWithoutAttestation] != ""; marked != slices.Contains(reported, r.Name) {
			t.Errorf("%s of %s for %s: reported %t", r.Name, r.Spec.Username, r.Spec.SignerName, marked)
		}
	}
	for name, want := range map[string]float64{"attested": 1, "other": 3, "forgotten": 0} {
		if got := f.around(t, name); got != want {
			t.Errorf("%s: counted %v, not %v", name, got, want)
		}
	}
}

// Our own certificates are not reported if the watch of records is late, or if their record was
// deleted.
func TestOwnCertificatesAreNotAround(t *testing.T) {
	f, dog := newWatchedFleet(t)
	m := f.newMachine(t, "own")
	f.inventoried(t, m)
	renews := m.attested(t)
	dog.hang()
	_, proof := renews.attests(t)
	f.issued(t, proof, m.name)
	f.stop()
	dog.goOn()
	remove(t, f, f.record(t, m.name))
	f.start(t)
	// The controller has checked all of them when it decides another request.
	hello := m.newPeer(t, m.chip, m.asToken(m.token), m.name, m.name).hello(t)
	harness.Eventually(t, time.Minute, "the hello is answered", func() bool { return len(f.get(t, hello.Name).Annotations[attestation.AnnotationChallenge]) > 0 })
	for _, r := range f.all(t) {
		if r.Annotations[intake.AnnotationIssuedWithoutAttestation] != "" || len(f.eventsAbout(t, r.Name, watch.ReasonIssuedWithoutAttestation)) > 0 {
			t.Errorf("%s, which is our own, is reported", r.Name)
		}
	}
}

// In audit mode, only others issue certificates. They are counted.
func TestIssuedAroundInAuditMode(t *testing.T) {
	counted, err := counters()
	if err != nil {
		t.Fatal(err)
	}
	f := newFleet(t, func(f *fleet, _ *verifier.Policy) {
		f.config.Audit, f.config.Metrics = true, counted.For(f.namespace)
	})
	token := f.newToken(t)
	request := f.files(t, f.asToken(token), kubeletSigner, fmt.Sprintf("audited-%s", f.namespace))
	f.approvedByHand(t, request)
	if err := f.StartControllerManager(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.StopControllerManager(); err != nil {
			t.Error(err)
		}
	})
	f.comesThrough(t, request)
	harness.Eventually(t, harness.Soon, "it is counted", func() bool { return f.around(t, "other") == 1 })
	if f.get(t, request.Name).Annotations[intake.AnnotationIssuedWithoutAttestation] != "" || len(f.eventsAbout(t, request.Name, watch.ReasonIssuedWithoutAttestation)) > 0 {
		t.Error("in audit mode it is reported")
	}
}
