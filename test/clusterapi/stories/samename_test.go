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

// sharedMachine is the name of a Machine in both Clusters.
const sharedMachine = "shared-1"

// Two namespaces each have a Cluster of the same name, with a MachineDeployment and a Machine of
// the same names. One controller serves both. Each machine joins its own cluster. Its bootstrap
// token, its requests and its user data do not work in the other cluster. This holds even for the
// host of the other cluster's Machine of the same name, whose TPM the controller knows.
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
	t.Cleanup(func() { // runs before the end of the first story
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
		deployments[c].newMachine(t, sharedMachine)
	}
	for c, d := range deployments {
		d.awaitRunning(t, 1)
		c.awaitSharedMachine(t)
	}
	if ofA, ofB := a.record(t, sharedMachine), b.record(t, sharedMachine); ofA.Spec.EK.Fingerprint == ofB.Spec.EK.Fingerprint || ofA.Spec.ProviderID == ofB.Spec.ProviderID {
		t.Errorf("the records of both clusters are for the same EK or provider ID: %+v and %+v", ofA.Spec, ofB.Spec)
	}

	// Read all requests before any of them is copied to the other cluster.
	hellos, proofs := map[*cluster]certificatesv1.CertificateSigningRequest{}, map[*cluster]certificatesv1.CertificateSigningRequest{}
	for _, c := range []*cluster{a, b} {
		ofHello, ofProof := harness.Requests(t, c.workload, sharedMachine)
		if len(ofHello) != 1 || len(ofProof) != 1 {
			t.Fatalf("there are %d hellos and %d proofs, want one each", len(ofHello), len(ofProof))
		}
		hellos[c], proofs[c] = ofHello[0], ofProof[0]
	}
	for _, from := range []*cluster{a, b} {
		to := map[*cluster]*cluster{a: b, b: a}[from]
		before := to.record(t, sharedMachine)
		// The bootstrap token of one cluster's Machine.
		_, err := to.asToken(t, from.token(t)).AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		if !apierrors.IsUnauthorized(err) {
			t.Errorf("the token of one cluster is valid in the other: %v", err)
		}
		// Its requests, filed by a client with a valid token of the other cluster.
		to.mustRefuseCopy(t, hellos[from], verifier.ReasonNodeNameMismatch)
		// the proof waits for a hello until it is denied
		to.mustRefuseCopy(t, proofs[from], verifier.ReasonHelloNotFound)
		// Its user data.
		from.mustRefuseHost(t, to)
		if after := to.record(t, sharedMachine); after.UID != before.UID || after.Spec.EK.Fingerprint != before.Spec.EK.Fingerprint ||
			len(after.Status.Certificates) != len(before.Status.Certificates) {
			t.Errorf("the record was changed from %+v to %+v", before, after)
		}
	}
	for _, c := range []*cluster{a, b} {
		if records := c.records(t); len(records) != 2 {
			t.Errorf("there are %d records, want 2", len(records))
		}
	}
}

// newMachine creates a single Machine, with the spec of the MachineDeployment's Machines.
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

// awaitSharedMachine waits until the shared Machine is Running, and its Node is Ready. Node and
// record must have the Machine's provider ID.
//
// Cluster API v1.14 maps a new Node to a Machine by the Node's name, in all namespaces. Once one of
// the two Machines is Running, Cluster API maps the other's Node to that Machine, too. So the other
// Machine is not requeued. The annotation that is set here requeues it.
func (c *cluster) awaitSharedMachine(t *testing.T) {
	t.Helper()
	m := &clusterv1.Machine{}
	harness.Eventually(t, joinLimit, "Node "+sharedMachine+" is in order", func() bool {
		harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: sharedMachine}, m))
		node, err := c.workload.Client().CoreV1().Nodes().Get(t.Context(), sharedMachine, metav1.GetOptions{})
		return err == nil && isReady(node) && node.Spec.ProviderID == m.Spec.ProviderID
	})
	c.annotateMachine(t, sharedMachine, func(m *clusterv1.Machine) { metav1.SetMetaDataAnnotation(&m.ObjectMeta, "story", "changed") })
	harness.Eventually(t, joinLimit, "Machine "+sharedMachine+" is Running", func() bool {
		harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: sharedMachine}, m))
		return m.Status.Phase == string(clusterv1.MachinePhaseRunning) && m.Status.NodeRef.Name == sharedMachine
	})
	if r := c.record(t, sharedMachine); r.Spec.ProviderID != m.Spec.ProviderID || len(r.OwnerReferences) != 1 || r.OwnerReferences[0].UID != m.UID {
		t.Errorf("the record of Machine %s (%s, %s) is for provider ID %s, and is owned by %v", sharedMachine, m.UID, m.Spec.ProviderID, r.Spec.ProviderID, r.OwnerReferences)
	}
}

// token returns the bootstrap token of the shared Machine.
func (c *cluster) token(t *testing.T) string {
	t.Helper()
	config := &bootstrapv1.KubeadmConfig{}
	harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: sharedMachine}, config))
	return config.Spec.JoinConfiguration.Discovery.BootstrapToken.Token
}

// asToken returns a client of the workload cluster that authenticates with a bootstrap token.
func (c *cluster) asToken(t *testing.T, token string) kubernetes.Interface {
	t.Helper()
	config := c.workload.AdminConfig()
	config.BearerToken, config.CertData, config.KeyData = token, nil, nil
	clients, err := kubernetes.NewForConfig(config)
	harness.Must(t, err)
	return clients
}

// mustRefuseCopy files a request of another cluster again here, with the token of this cluster's
// Machine. The copy must be refused.
func (c *cluster) mustRefuseCopy(t *testing.T, filed certificatesv1.CertificateSigningRequest, reason verifier.Reason) {
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

// mustRefuse waits until the controller has reacted to a request. The request must be denied, or
// wait, with that reason. It must have neither certificate nor challenge.
func (c *cluster) mustRefuse(t *testing.T, name, what string, reason verifier.Reason) {
	t.Helper()
	var r *certificatesv1.CertificateSigningRequest
	harness.Eventually(t, time.Minute, "the controller reacts to "+what, func() bool {
		var err error
		r, err = c.workload.Client().CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
		harness.Must(t, err)
		return len(r.Status.Conditions)+len(r.Status.Certificate) > 0 || r.Annotations[attestation.AnnotationWaiting]+r.Annotations[attestation.AnnotationChallenge] != ""
	})
	if len(r.Status.Certificate) > 0 || r.Annotations[attestation.AnnotationChallenge] != "" {
		t.Errorf("%s was answered: %+v", what, r)
	}
	waiting, _ := attestation.ParseStatement(r.Annotations[attestation.AnnotationWaiting])
	if !isDenied(r, reason) && waiting.Reason != string(reason) {
		t.Errorf("%s is neither denied nor waits with the reason %s: %+v, %+v", what, reason, r.Status.Conditions, waiting)
	}
}

// mustRefuseHost runs the plugin on the host of the other Cluster's Machine. It uses the token,
// name and provider ID of this Cluster's Machine. Its requests must be refused.
func (c *cluster) mustRefuseHost(t *testing.T, other *cluster) {
	t.Helper()
	before, _ := harness.Requests(t, c.workload, sharedMachine)
	m := &infrav1.MetalMachine{}
	harness.Must(t, other.client.Get(t.Context(), client.ObjectKey{Namespace: other.namespace, Name: sharedMachine}, m))
	host, err := other.hosts.Machine(t.Context(), m.Spec.ProviderID[len("metal://"):])
	harness.Must(t, err)
	folder := filepath.Join("/root", c.namespace)
	harness.Must(t, host.WriteFile(folder+"/bootstrap.kubeconfig", c.workload.BootstrapKubeconfig(c.token(t)), 0o600))
	record := c.record(t, sharedMachine)
	out, err := host.Run(t.Context(), "env", harness.ExecInfo(c.workload.ServerURL(), c.workload.ServerCA()), "timeout", "20", "kubelet-authenticator",
		"--node-name="+sharedMachine, "--provider-id="+record.Spec.ProviderID, "--tpm-device=/dev/tpm0", "--cert-dir="+folder+"/certs", "--runtime-dir="+folder,
		"--bootstrap-kubeconfig="+folder+"/bootstrap.kubeconfig")
	if err == nil {
		t.Errorf("the machine of the other Cluster got a credential: %s", out)
	}
	known := map[string]bool{}
	for _, r := range before {
		known[r.Name] = true
	}
	after, _ := harness.Requests(t, c.workload, sharedMachine)
	asked := 0
	for _, r := range after {
		if !known[r.Name] {
			asked++
			c.mustRefuse(t, r.Name, fmt.Sprintf("the hello of the machine of %s in %s", other.namespace, c.namespace), verifier.ReasonNodeNameMismatch)
		}
	}
	if asked == 0 {
		t.Errorf("the machine of the other Cluster has sent no request: %s", out)
	}
}
