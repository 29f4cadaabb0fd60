// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// checkInterval is the shortest that the plugin takes.
const checkInterval = 10 * time.Second

// instance is a machine of a cloud.
type instance struct {
	provider, nodeName, providerID string
	// is what the record has to say of it.
	is attestation.Instance
	// copied is the reason for which a copy of its evidence is refused.
	copied verifier.Reason
	// givenProviderID says that the plugin is given the provider ID.
	givenProviderID bool
	// device starts its TPM, and returns the path. It is nil if the machine has none.
	device func(t *testing.T) string
	// foreign is a machine of another account, project or subscription, or of a platform that is
	// not the cloud's. foreignReason is why it is refused.
	foreign       func(t *testing.T) provider.Provider
	foreignReason verifier.Reason
	// faults break the service that the controller asks, each in another way, and mend makes it
	// work. There are none if the controller asks nobody.
	faults []func()
	mend   func()
	// asksEachTime says that the controller needs an answer for each request.
	asksEachTime bool
}

// A machine of each cloud becomes a node by what its platform says of it, with the released plugin
// and controller and without rights in the cloud. Its record names the instance. After its
// certificate is revoked, new evidence gets it another one. Its evidence is worth nothing in
// another request.
func TestInstanceBecomesReady(t *testing.T) {
	t.Parallel()
	for _, i := range shared.instances {
		t.Run(i.provider, func(t *testing.T) {
			t.Parallel()
			m := &harness.Machine{Name: i.nodeName, Dir: t.TempDir(), Plugin: built.Plugin}
			if i.device != nil {
				m.Device = i.device(t)
			}
			if i.givenProviderID {
				m.ProviderID = i.providerID
			}
			m.Bootstrap = filepath.Join(m.Dir, "bootstrap.kubeconfig")
			began, mended := time.Now(), make(chan struct{})
			go i.breakService(t, mended)
			n := harness.StartKubeletNode(t, m, harness.KubeletNodeOptions{
				Cluster: shared.ControlPlane, Components: built.Kubelet, CheckInterval: checkInterval, Admit: shared.admit, Provider: i.provider,
				Entry: fmt.Appendf(nil, "---\nnodeName: %s\nproviderID: %s\n", i.nodeName, i.providerID),
			})
			<-mended
			t.Logf("ready after %s", time.Since(began).Round(10*time.Millisecond))
			record := recordOf(t, i.nodeName)
			is := record.Spec.Instance
			if is == nil || *is != (v1alpha1.Instance{Platform: i.is.Platform, ID: i.is.ID, Account: i.is.Account}) ||
				record.Spec.EK == nil || record.Spec.EK.Fingerprint != i.is.Fingerprint() || record.Spec.Provider != i.provider || record.Spec.ProviderID != i.providerID {
				t.Errorf("the record is %+v, instance %+v", record.Spec, is)
			}
			first := n.Pair(t).Fingerprint()
			i.copiesAreRefused(t)
			i.foreignIsRefused(t)

			// It renews while the service is away. With the last known answer the controller
			// issues. If it needs an answer for each request, the old certificate goes on.
			pulse := harness.WatchNode(t, shared.Client(), i.nodeName)
			if i.mend != nil {
				i.faults[0]()
			}
			i.orders(t, "rotate", "--spread=1s")
			if i.asksEachTime {
				i.waitsWith(t, n, first)
				i.mend()
			}
			second := i.nextCertificate(t, n, first)
			if i.mend != nil {
				i.mend()
			}
			pulse.Stop()
			pulse.Steady(t, longestGap, time.Now())

			// The key is stolen: the node attests with a revoked certificate.
			i.orders(t, "revoke")
			i.nextCertificate(t, n, second)
			if got := len(recordOf(t, i.nodeName).Status.Certificates); got != 3 {
				t.Errorf("the record has %d certificates", got)
			}
		})
	}
}

// longestGap is the longest time between two renewals of the Lease. A kubelet renews it each 10 s.
const longestGap = 15 * time.Second

// orders runs revoke or rotate of kubectl attest for the node.
func (i *instance) orders(t *testing.T, command string, args ...string) {
	t.Helper()
	harness.NextSecond()
	harness.KubectlAttest(t, shared.ControlPlane, built.Commands, "created", append([]string{command, i.nodeName, "--reason=test", "--yes", "--wait=false"}, args...)...)
}

// waitsWith waits until the node has asked for its next certificate, and fails the test unless it
// goes on with the given one.
func (i *instance) waitsWith(t *testing.T, n *harness.KubeletNode, current string) {
	t.Helper()
	harness.Eventually(t, harness.Soon, "the node asks for the next certificate", func() bool {
		_, filed := harness.Requests(t, shared.ControlPlane, i.nodeName)
		return slices.ContainsFunc(filed, func(r certificatesv1.CertificateSigningRequest) bool {
			return r.Spec.Username == "system:node:"+i.nodeName && state.Of(&r) == state.Pending
		})
	})
	time.Sleep(faultTime)
	if n.Pair(t).Fingerprint() != current {
		t.Error("it got a certificate while the service was away")
	}
	n.Credential(t).MustWrite(t)
}

// nextCertificate waits until the node has another certificate than the given one, by new evidence,
// and returns its fingerprint.
func (i *instance) nextCertificate(t *testing.T, n *harness.KubeletNode, before string) string {
	t.Helper()
	harness.Eventually(t, 90*time.Second, "the node gets another certificate by new evidence", func() bool { return n.Pair(t).Fingerprint() != before })
	n.Credential(t).MustWrite(t)
	return n.Pair(t).Fingerprint()
}

// faultTime is how long each fault lasts. After a failure, the controller asks again after 2 s, and
// later each time.
const faultTime = 2 * time.Second

// breakService breaks the service that the controller asks about the first request of an instance,
// until each fault has lasted for a while with that request. It fails the test if the request is
// decided on meanwhile: nothing may be accepted, and the node is not at fault.
func (i *instance) breakService(t *testing.T, mended chan<- struct{}) {
	defer close(mended)
	if i.mend == nil {
		return
	}
	defer i.mend()
	i.faults[0]()
	filed := func() []certificatesv1.CertificateSigningRequest {
		_, filed := harness.Requests(t, shared.ControlPlane, i.nodeName)
		return filed
	}
	for deadline := time.Now().Add(harness.Soon); len(filed()) == 0 && time.Now().Before(deadline); {
		time.Sleep(100 * time.Millisecond)
	}
	for n, fault := range i.faults {
		fault()
		time.Sleep(faultTime)
		if all := filed(); len(all) != 1 || state.Of(&all[0]) != state.Pending {
			t.Errorf("fault %d: there are %d requests, or it is decided: %+v", n, len(all), all)
		}
	}
}

// recordOf returns the record of a node.
func recordOf(t *testing.T, node string) *v1alpha1.NodeAttestation {
	t.Helper()
	found := &v1alpha1.NodeAttestationList{}
	harness.Must(t, shared.records.List(t.Context(), found, client.InNamespace(controllerprocess.Namespace), client.MatchingFields{v1alpha1.FieldNodeName: node}))
	if len(found.Items) != 1 {
		t.Fatalf("%s has %d records", node, len(found.Items))
	}
	return &found.Items[0]
}

// copiesAreRefused fails the test unless the evidence of an instance is refused with a key of a
// thief who has a bootstrap token, and if the same request is filed once more after its deletion.
func (i *instance) copiesAreRefused(t *testing.T) {
	t.Helper()
	_, filed := harness.Requests(t, shared.ControlPlane, i.nodeName)
	if len(filed) != 1 {
		t.Fatalf("%s has filed %d requests", i.nodeName, len(filed))
	}
	content, err := attestation.Parse(filed[0].Spec.Request)
	harness.Must(t, err)

	copied := content
	key, _, err := csr.NewKey()
	harness.Must(t, err)
	copied.PKCS10, err = csr.PKCS10(csr.Identity{NodeName: i.nodeName, ProviderID: i.providerID}, key)
	harness.Must(t, err)
	request, err := copied.Marshal()
	harness.Must(t, err)
	i.isRefused(t, "evidence beside another key", filed[0].Spec, csr.NewName(), request, i.copied)
	i.isRefused(t, "the same request under another name", filed[0].Spec, csr.NewName(), filed[0].Spec.Request, i.copied)

	harness.Must(t, shared.Client().CertificatesV1().CertificateSigningRequests().Delete(t.Context(), filed[0].Name, metav1.DeleteOptions{}))
	i.isRefused(t, "the same request after its deletion", filed[0].Spec, filed[0].Name, filed[0].Spec.Request, verifier.ReasonIdentityBound)
}

// foreignIsRefused fails the test unless a machine of another account is refused as this node.
func (i *instance) foreignIsRefused(t *testing.T) {
	t.Helper()
	key, _, err := csr.NewKey()
	harness.Must(t, err)
	pkcs10, err := csr.PKCS10(csr.Identity{NodeName: i.nodeName, ProviderID: i.providerID}, key)
	harness.Must(t, err)
	foreign := i.foreign(t)
	spec, name := certificatesv1.CertificateSigningRequestSpec{SignerName: foreign.SignerName(), Usages: csr.Usages(key.Public())}, csr.NewName()
	var usages []string
	for _, usage := range spec.Usages {
		usages = append(usages, string(usage))
	}
	evidence, err := foreign.Evidence(t.Context(), provider.Request{
		PKCS10: pkcs10, NodeName: i.nodeName, ProviderID: i.providerID, Name: name, SignerName: spec.SignerName, Usages: usages,
	})
	harness.Must(t, err)
	request, err := attestation.Request{PKCS10: pkcs10, Provider: i.provider, Data: evidence}.Marshal()
	harness.Must(t, err)
	i.isRefused(t, "evidence of another account", spec, name, request, i.foreignReason)
}

// isRefused files a request with a bootstrap token, and fails the test unless it is denied for a
// reason.
func (i *instance) isRefused(t *testing.T, what string, like certificatesv1.CertificateSigningRequestSpec, name string, request []byte, reason verifier.Reason) {
	t.Helper()
	requests := shared.thief(t).CertificatesV1().CertificateSigningRequests()
	_, err := requests.Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       certificatesv1.CertificateSigningRequestSpec{Request: request, SignerName: like.SignerName, Usages: like.Usages, ExpirationSeconds: like.ExpirationSeconds},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	var decided *certificatesv1.CertificateSigningRequestCondition
	harness.Eventually(t, harness.Soon, what+" is decided on", func() bool {
		object, err := shared.Client().CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
		harness.Must(t, err)
		var reached state.State
		reached, decided = state.Explain(object)
		return reached != state.Pending
	})
	if decided == nil || decided.Reason != string(reason) {
		t.Errorf("%s: %+v, want %s", what, decided, reason)
	}
}

// thief returns a client with a bootstrap token.
func (b *bed) thief(t *testing.T) kubernetes.Interface {
	t.Helper()
	token, err := b.CreateBootstrapToken(t.Context(), 10*time.Minute)
	harness.Must(t, err)
	config := b.AdminConfig()
	config.BearerToken, config.CertData, config.KeyData = token, nil, nil
	api, err := kubernetes.NewForConfig(config)
	harness.Must(t, err)
	return api
}
