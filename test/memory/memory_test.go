// SPDX-License-Identifier: Apache-2.0

// Package memory tests that node-attestation-controller needs no more memory than its manifest's
// limit, even if others file many large requests.
package memory

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../.."
	// fullVariable asks for the whole number of requests under the whole limit.
	fullVariable = "KUBELET_AUTHENTICATOR_TEST_MEMORY"
	// full is how many requests of each kind that is, and part how many "make test-all" files.
	full, part = 1000, 100
	// base is what the controller needs without requests: "make test-all" limits it to this and a
	// tenth of the rest.
	base = 44 << 20
	// labels of 64 bytes make 600 kB, and so do finalizers of 317 with an annotation.
	labels, finalizers, annotation = 9375, 1066, 262_000
	// connections is how many file at a time.
	connections = 8
	// nobodysSigner has no controller.
	nobodysSigner = "example.com/nobody"
	// enrolTimeout bounds an enrolment beside a flood, of which the controller denies first.
	enrolTimeout = 3 * time.Minute
	noAudit      = "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: None}]\n"
)

// The controller runs under the limit of its manifest, in a control group. There are many requests
// when it starts. Some are under our signers, as large as the API server accepts. Others have 600
// kB, under a signer that belongs to nobody, or under our signers from before the policies. A
// machine enrols while they are read and denied, and another one after the controller was killed.
func TestMemoryLimit(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a limit on memory needs root")
	}
	count := part
	whole := os.Getenv(fullVariable) == "full"
	if whole {
		count = full
	}
	dir := t.TempDir()
	limit, env := container(t, whole)
	group, err := testbed.NewMemoryGroup(limit)
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, group.Remove()) })
	binary := filepath.Join(dir, "node-attestation-controller")
	harness.Must(t, controllerprocess.Build(t.Context(), module, binary))

	cp, err := testbed.Start(t.Context(), testbed.Options{
		Progress: os.Stderr, AuditPolicy: []byte(noAudit), EtcdArgs: []string{"--quota-backend-bytes=" + strconv.Itoa(12<<30)},
	})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, cp.Stop()) })
	harness.Must(t, cp.BindKubeadmBootstrap(t.Context()))
	attackers, err := cp.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	token, err := cp.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	f := newFlood(t, cp, attackers)

	f.file(t, count, f.heavy(attestation.HelloSignerName), f.bootstrapper)
	harness.Must(t, controllerprocess.Install(t.Context(), cp, module))
	f.file(t, count, f.largest(t), f.bootstrapper)
	f.file(t, count, f.heavy(nobodysSigner), f.somebody)

	machines := newMachines(t, cp, 2)
	controller, err := controllerprocess.New(controllerprocess.Options{
		ControlPlane: cp, Dir: t.TempDir(), Binary: binary, Env: env, Memory: group,
		// A leader ends by itself where a busy machine's API server takes longer than its Lease.
		Configure: func(c *config.Config) { c.LeaderElection.Enabled = false },
	})
	harness.Must(t, err)
	t.Cleanup(func() {
		err := controller.Kill()
		killed, err2 := group.Killed()
		peak, err3 := group.Peak()
		t.Logf("limit %d MiB, most used %d MiB, killed by the kernel %d times", limit>>20, peak>>20, killed)
		if err := errors.Join(err, err2, err3); err != nil || killed > 0 {
			t.Errorf("the controller was killed by the kernel %d times: %v", killed, err)
		}
	})
	for i, machine := range machines {
		if i == 1 {
			// As with an API server before Kubernetes 1.34: requests are listed.
			t.Setenv("KUBE_FEATURE_WatchListClient", "false")
		}
		harness.Must(t, controller.Start(t.Context()))
		start := time.Now()
		f.enrols(t, machine, token, controller)
		t.Logf("start %d: a machine enrolled after %s", i+1, time.Since(start))
		if i == 0 {
			harness.Must(t, controller.Kill())
		}
	}
	awaitDenials(t, controller)
}

// container returns the limit on memory of the controller's container and its environment, as the
// kubelet makes it. Unless the whole is asked for, the limit is scaled down.
func container(t *testing.T, whole bool) (limit int64, env []string) {
	t.Helper()
	c, err := controllerprocess.ReadContainer(module)
	harness.Must(t, err)
	limit = c.Memory
	if !whole {
		limit = base + (limit-base)*part/full
	}
	return limit, c.Env(limit)
}

// flood files requests.
type flood struct {
	*testbed.ControlPlane
	key     crypto.PublicKey
	content []byte
	der     []byte
	// bootstrapper has a bootstrap token; somebody may create requests, and is in none of the
	// groups of bootstrap tokens and nodes.
	bootstrapper, somebody *rest.Config
}

func newFlood(t *testing.T, cp *testbed.ControlPlane, token string) *flood {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	harness.Must(t, err)
	subject := pkix.Name{CommonName: "system:node:victim", Organization: []string{"system:nodes"}}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject}, key)
	harness.Must(t, err)
	f := &flood{ControlPlane: cp, key: key.Public(), der: der}
	f.content, err = f.request(1000)
	harness.Must(t, err)
	f.bootstrapper = &rest.Config{Host: cp.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: cp.ServerCA()}, BearerToken: token, QPS: -1}
	f.somebody = cp.AdminConfig()
	f.somebody.Impersonate = rest.ImpersonationConfig{UserName: "somebody", Groups: []string{"system:authenticated"}}
	role := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "somebody"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{certificatesv1.GroupName}, Resources: []string{"certificatesigningrequests"}, Verbs: []string{"create"}}},
	}
	_, err = cp.Client().RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = cp.Client().RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "somebody"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "somebody"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "somebody"}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	return f
}

// request is one in our form, with a document of a length.
func (f *flood) request(length int) ([]byte, error) {
	document := []byte(`{"a":"` + strings.Repeat("a", length) + `"}`)
	return attestation.Request{PKCS10: f.der, Provider: tpm.Name, Data: document}.Marshal()
}

// heavy returns requests with 600 kB of metadata. One in ten has it in labels, which cost the API
// server most. The others have it in finalizers and an annotation.
func (f *flood) heavy(signer string) func() *certificatesv1.CertificateSigningRequest {
	prefix, final := strings.Repeat("x.", 126)+"x/", make([]string, finalizers)
	for i := range final {
		final[i] = fmt.Sprintf("%s%s%07d", prefix, strings.Repeat("x", 56), i)
	}
	labelled := map[string]string{}
	for i := range labels {
		labelled[fmt.Sprintf("l%07d", i)] = strings.Repeat("x", 56)
	}
	filed := 0
	return func() *certificatesv1.CertificateSigningRequest {
		r := csr.Object(csr.NewName(), signer, f.content, f.key, nil)
		if filed++; filed%10 == 0 {
			r.Labels = labelled
		} else {
			r.Finalizers, r.Annotations = final, map[string]string{"a": strings.Repeat("x", annotation)}
		}
		return r
	}
}

// largest returns requests with as long a document and as much metadata as the API server takes.
func (f *flood) largest(t *testing.T) func() *certificatesv1.CertificateSigningRequest {
	t.Helper()
	api := f.client(t, f.bootstrapper)
	largest, err := oddrequest.Largest("victim", func(r *certificatesv1.CertificateSigningRequest) error {
		_, err := api.CertificatesV1().CertificateSigningRequests().Create(t.Context(), r, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	})
	harness.Must(t, err)
	t.Logf("the largest have %d bytes of spec.request and %d of annotations", len(largest.Spec.Request), len(largest.Annotations["a"]))
	if len(largest.Spec.Request) < attestation.MaxRequestSize-100 {
		t.Errorf("the API server takes no more than %d bytes of spec.request", len(largest.Spec.Request))
	}
	return func() *certificatesv1.CertificateSigningRequest {
		r := largest.DeepCopy()
		r.Name = csr.NewName()
		return r
	}
}

// client returns one with a connection of its own, which sends what costs the API server least.
func (f *flood) client(t *testing.T, config *rest.Config) kubernetes.Interface {
	t.Helper()
	config = rest.CopyConfig(config)
	config.ContentType, config.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf"
	api, err := kubernetes.NewForConfig(config)
	harness.Must(t, err)
	return api
}

func (f *flood) file(t *testing.T, count int, next func() *certificatesv1.CertificateSigningRequest, config *rest.Config) {
	t.Helper()
	began := time.Now()
	api, errs := f.client(t, config), make(chan error, connections)
	work := make(chan *certificatesv1.CertificateSigningRequest)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var filing sync.WaitGroup
	for range connections {
		filing.Go(func() {
			for r := range work {
				_, err := api.CertificatesV1().CertificateSigningRequests().Create(ctx, r, metav1.CreateOptions{})
				// it is busy with the others
				for apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) || apierrors.IsTooManyRequests(err) {
					_, err = api.CertificatesV1().CertificateSigningRequests().Create(ctx, r, metav1.CreateOptions{})
				}
				// a create that has timed out may have been done
				if err != nil && !apierrors.IsAlreadyExists(err) {
					errs <- err
					cancel()
					return
				}
			}
		})
	}
	for range count {
		select {
		case work <- next():
		case <-ctx.Done():
		}
	}
	close(work)
	filing.Wait()
	select {
	case err := <-errs:
		t.Fatal(err)
	default:
	}
	t.Logf("%d were filed in %s", count, time.Since(began))
}

// enrols has a machine get a certificate while the controller reads what is there.
func (f *flood) enrols(t *testing.T, m *fleet.Machine, token string, controller *controllerprocess.Controller) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), enrolTimeout)
	defer cancel()
	process := controller.Process()
	go func() { // a killed controller ends the wait
		select {
		case <-process.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	cluster := fleet.Cluster{URL: f.ServerURL(), CA: f.ServerCA(), Token: token, Issuer: f.ClientCA().Certificate()}
	if _, err := m.Attest(ctx, cluster); err != nil {
		t.Fatalf("no certificate: %v\n%s", err, controller.LogTail())
	}
}

// awaitDenials waits until the controller has denied some of the flood since its start. To deny all
// takes minutes: of one requester it denies one at a time, and the API server is slow with each.
func awaitDenials(t *testing.T, controller *controllerprocess.Controller) {
	t.Helper()
	const enough = 10
	// Not more often: metrics cost the memory that is measured.
	for deadline := time.Now().Add(enrolTimeout); ; time.Sleep(200 * time.Millisecond) {
		metrics, err := controller.Metrics(t.Context())
		harness.Must(t, err)
		denied := 0.0
		for line := range strings.Lines(metrics) {
			if strings.HasPrefix(line, "node_attestation_decisions_total{") && strings.Contains(line, `outcome="Deny"`) && strings.Contains(line, `reason="AttestationMalformed"`) {
				fields := strings.Fields(line)
				n, err := strconv.ParseFloat(fields[len(fields)-1], 64)
				harness.Must(t, err)
				denied += n
			}
		}
		if denied >= enough {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%g requests were denied\n%s", denied, controller.LogTail())
		}
	}
}

// newMachines makes machines that are in the inventory.
func newMachines(t *testing.T, cp *testbed.ControlPlane, count int) []*fleet.Machine {
	t.Helper()
	maker, err := swtpm.NewCA()
	harness.Must(t, err)
	machines, err := fleet.Make(count, func(i int) (*fleet.Machine, error) {
		return fleet.NewSwtpm(fmt.Sprintf("honest-%d", i), t.TempDir(), maker)
	})
	harness.Must(t, err)
	for _, m := range machines {
		t.Cleanup(m.Stop)
	}
	content, err := fleet.Inventory(t.Context(), machines...)
	harness.Must(t, err)
	harness.Must(t, controllerprocess.SetInventory(t.Context(), cp, content))
	return machines
}
