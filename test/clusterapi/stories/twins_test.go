// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
)

// twin is the name of a Machine in both Clusters.
const twin = "twin-1"

// Two namespaces have a Cluster of the same name, with MachineDeployments and a Machine of the same
// names. One controller serves both. Each machine joins its own cluster, and what it has is worth
// nothing in the other: not its bootstrap token, nor what it filed, nor its user data in the hands
// of the machine of its name, whose TPM the controller knows.
func TestClustersOfTheSameName(t *testing.T) {
	full(t)
	t.Parallel()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "story-"}}
	harness.Must(t, shared.client.Create(t.Context(), namespace))
	first := newStory(t, func(file map[string]any) {
		settings := file["clusterAPI"].(map[string]any)
		settings["namespaces"] = append(settings["namespaces"].([]any), namespace.Name)
	})
	second := &story{bed: first.bed, namespace: namespace.Name, controller: first.controller}
	t.Cleanup(func() { // before the first one's end
		harness.Must(t, second.deleteClusters(context.WithoutCancel(t.Context())))
		for _, c := range second.clusters {
			harness.Must(t, c.workload.Stop())
		}
	})
	a, b := first.newCluster(t, "one"), second.newCluster(t, "one")
	deployments := map[*cluster]*machineDeployment{}
	for _, c := range []*cluster{a, b} {
		deployments[c] = c.newMachineDeployment(t, "workers", nil)
		deployments[c].scale(t, 1)
		deployments[c].newMachine(t, twin)
	}
	for c, d := range deployments {
		d.awaitRunning(t, 1)
		c.awaitTwin(t)
	}
	if ofA, ofB := a.record(t, twin), b.record(t, twin); ofA.Spec.EK.Fingerprint == ofB.Spec.EK.Fingerprint || ofA.Spec.ProviderID == ofB.Spec.ProviderID {
		t.Errorf("one machine is in both clusters: %+v and %+v", ofA.Spec, ofB.Spec)
	}

	// Before any of it is filed in the other cluster.
	hellos, proofs := map[*cluster]certificatesv1.CertificateSigningRequest{}, map[*cluster]certificatesv1.CertificateSigningRequest{}
	for _, c := range []*cluster{a, b} {
		ofHello, ofProof := harness.Requests(t, c.workload, twin)
		if len(ofHello) != 1 || len(ofProof) != 1 {
			t.Fatalf("%d hellos and %d proofs", len(ofHello), len(ofProof))
		}
		hellos[c], proofs[c] = ofHello[0], ofProof[0]
	}
	for _, from := range []*cluster{a, b} {
		to := map[*cluster]*cluster{a: b, b: a}[from]
		before := to.record(t, twin)
		// Its token.
		_, err := to.asToken(t, from.token(t)).AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		if !apierrors.IsUnauthorized(err) {
			t.Errorf("the token of one is good in the other: %v", err)
		}
		// What it filed, by somebody with a token that is good there.
		to.refusesCopy(t, hellos[from], verifier.ReasonNodeNameMismatch)
		to.refusesCopy(t, proofs[from], verifier.ReasonHelloNotFound) // it waits for one until it is denied
		// Its user data.
		from.refusesHost(t, to)
		if after := to.record(t, twin); after.UID != before.UID || after.Spec.EK.Fingerprint != before.Spec.EK.Fingerprint ||
			len(after.Status.Certificates) != len(before.Status.Certificates) {
			t.Errorf("the record was changed from %+v to %+v", before, after)
		}
	}
	for _, c := range []*cluster{a, b} {
		if records := c.records(t); len(records) != 2 {
			t.Errorf("%d records", len(records))
		}
	}
}

// newMachine makes a Machine by itself, as those of the MachineDeployment are.
func (d *machineDeployment) newMachine(t *testing.T, name string) {
	t.Helper()
	m := &clusterv1.Machine{ObjectMeta: d.meta(name), Spec: *d.object.Spec.Template.Spec.DeepCopy()}
	m.Spec.Bootstrap.ConfigRef = reference(bootstrapv1.GroupVersion.Group, "KubeadmConfig", name)
	m.Spec.InfrastructureRef = reference(infrav1.GroupVersion.Group, "MetalMachine", name)
	for _, object := range []client.Object{
		&infrav1.MetalMachine{ObjectMeta: d.meta(name)}, &bootstrapv1.KubeadmConfig{ObjectMeta: d.meta(name), Spec: *d.template.Spec.Template.Spec.DeepCopy()}, m,
	} {
		harness.Must(t, d.client.Create(t.Context(), object))
	}
}

// awaitTwin waits until the Machine of that name is Running, on the Node with its provider ID, and
// has a record.
//
// Cluster API v1.14 looks for the Machine of a new Node by the Node's name, in all namespaces: once
// one of the twins is Running, the other's Node is taken for the first one's. So the other Machine
// is looked at when something else changes it, which is done here.
func (c *cluster) awaitTwin(t *testing.T) {
	t.Helper()
	m := &clusterv1.Machine{}
	harness.Eventually(t, joinLimit, "Node "+twin+" is in order", func() bool {
		harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: twin}, m))
		node, err := c.workload.Client().CoreV1().Nodes().Get(t.Context(), twin, metav1.GetOptions{})
		return err == nil && isReady(node) && node.Spec.ProviderID == m.Spec.ProviderID
	})
	c.annotateMachine(t, twin, func(m *clusterv1.Machine) { metav1.SetMetaDataAnnotation(&m.ObjectMeta, "story", "changed") })
	harness.Eventually(t, joinLimit, "Machine "+twin+" is Running", func() bool {
		harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: twin}, m))
		return m.Status.Phase == string(clusterv1.MachinePhaseRunning) && m.Status.NodeRef.Name == twin
	})
	if r := c.record(t, twin); r.Spec.ProviderID != m.Spec.ProviderID || len(r.OwnerReferences) != 1 || r.OwnerReferences[0].UID != m.UID {
		t.Errorf("the record of Machine %s (%s, %s) is about %s, and owned by %v", twin, m.UID, m.Spec.ProviderID, r.Spec.ProviderID, r.OwnerReferences)
	}
}

// token returns the bootstrap token that was made for the Machine of that name.
func (c *cluster) token(t *testing.T) string {
	t.Helper()
	config := &bootstrapv1.KubeadmConfig{}
	harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: twin}, config))
	return config.Spec.JoinConfiguration.Discovery.BootstrapToken.Token
}

// asToken returns a client of the workload cluster with a bootstrap token.
func (c *cluster) asToken(t *testing.T, token string) kubernetes.Interface {
	t.Helper()
	config := c.workload.AdminConfig()
	config.BearerToken, config.CertData, config.KeyData = token, nil, nil
	clients, err := kubernetes.NewForConfig(config)
	harness.Must(t, err)
	return clients
}

// refusesCopy files again, with the token of its own machine, what was filed in another cluster.
func (c *cluster) refusesCopy(t *testing.T, filed certificatesv1.CertificateSigningRequest, reason verifier.Reason) {
	t.Helper()
	again := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: csr.NewName()}, Spec: certificatesv1.CertificateSigningRequestSpec{
		Request: filed.Spec.Request, SignerName: filed.Spec.SignerName, Usages: filed.Spec.Usages, ExpirationSeconds: filed.Spec.ExpirationSeconds,
	}}
	requests := c.asToken(t, c.token(t)).CertificatesV1().CertificateSigningRequests()
	again, err := requests.Create(t.Context(), again, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("%s of the other cluster cannot be filed: %v", filed.Spec.SignerName, err)
	}
	c.mustRefuse(t, again.Name, filed.Spec.SignerName+" of the other cluster", reason)
}

// mustRefuse waits until a request is denied or says why it waits, for that reason, and checks that
// it has got nothing.
func (c *cluster) mustRefuse(t *testing.T, name, what string, reason verifier.Reason) {
	t.Helper()
	var r *certificatesv1.CertificateSigningRequest
	harness.Eventually(t, time.Minute, what+" is judged", func() bool {
		var err error
		r, err = c.workload.Client().CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
		harness.Must(t, err)
		return len(r.Status.Conditions)+len(r.Status.Certificate) > 0 || r.Annotations[attestation.AnnotationWaiting]+r.Annotations[attestation.AnnotationChallenge] != ""
	})
	if len(r.Status.Certificate) > 0 || r.Annotations[attestation.AnnotationChallenge] != "" {
		t.Errorf("%s was answered: %+v", what, r)
	}
	waiting, _ := attestation.ParseWaiting(r.Annotations[attestation.AnnotationWaiting])
	if !isDenied(r, reason) && waiting.Reason != string(reason) {
		t.Errorf("%s is neither denied for %s nor waits for it: %+v, %+v", what, reason, r.Status.Conditions, waiting)
	}
}

// refusesHost has the host of the other Cluster's Machine ask here, with the user data of this
// Cluster's Machine: token, name and provider ID.
func (c *cluster) refusesHost(t *testing.T, other *cluster) {
	t.Helper()
	before, _ := harness.Requests(t, c.workload, twin)
	m := &infrav1.MetalMachine{}
	harness.Must(t, other.client.Get(t.Context(), client.ObjectKey{Namespace: other.namespace, Name: twin}, m))
	host, err := other.hosts.Machine(t.Context(), m.Spec.ProviderID[len("metal://"):])
	harness.Must(t, err)
	folder := filepath.Join("/root", c.namespace)
	harness.Must(t, host.WriteFile(folder+"/bootstrap.kubeconfig", c.workload.BootstrapKubeconfig(c.token(t)), 0o600))
	record := c.record(t, twin)
	out, err := host.Run(t.Context(), "env", harness.ExecInfo(c.workload.ServerURL(), c.workload.ServerCA()), "timeout", "20", "kubelet-authenticator",
		"--node-name="+twin, "--provider-id="+record.Spec.ProviderID, "--tpm-device=/dev/tpm0", "--cert-dir="+folder+"/certs", "--runtime-dir="+folder,
		"--bootstrap-kubeconfig="+folder+"/bootstrap.kubeconfig")
	if err == nil {
		t.Errorf("the machine of the other Cluster got a credential: %s", out)
	}
	known := map[string]bool{}
	for _, r := range before {
		known[r.Name] = true
	}
	after, _ := harness.Requests(t, c.workload, twin)
	asked := 0
	for _, r := range after {
		if !known[r.Name] {
			asked++
			c.mustRefuse(t, r.Name, fmt.Sprintf("the hello of the machine of %s in %s", other.namespace, c.namespace), verifier.ReasonNodeNameMismatch)
		}
	}
	if asked == 0 {
		t.Errorf("the machine of the other Cluster has not asked: %s", out)
	}
}
