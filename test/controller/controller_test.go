// SPDX-License-Identifier: Apache-2.0

// Package controller tests the controller against a real API server, with real plugins and software
// TPMs.
package controller

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifiertpm "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const crdName = "crd/nodeattestations.attestation.cluster.x-k8s.io"

// bed has what all tests of the package share. The tests run one after the other.
type bed struct {
	*testbed.ControlPlane
	plugin, controller string
	// adminConfig is an administrator's kubeconfig.
	adminConfig string
	client      client.Client
}

var (
	shared *bed
	// fleets counts the fleets: each has a namespace of its own.
	fleets int
)

func TestMain(m *testing.M) {
	log := logr.Discard()
	if os.Getenv("VERBOSE") != "" { // what the controllers say
		log = funcr.New(func(prefix, args string) { fmt.Fprintln(os.Stderr, prefix, args) }, funcr.Options{})
	}
	ctrl.SetLogger(log)
	os.Exit(testbed.Main(m, setUp))
}

func setUp(ctx context.Context, cp *testbed.ControlPlane, dir string) (err error) {
	b := &bed{ControlPlane: cp, plugin: filepath.Join(dir, "kubelet-authenticator"), controller: filepath.Join(dir, "node-attestation-controller"), adminConfig: filepath.Join(dir, "admin.kubeconfig")}
	if err := compile.Program(ctx, "../..", b.plugin, "./cmd/kubelet-authenticator"); err != nil {
		return err
	}
	if err := controllerprocess.Build(ctx, "../..", b.controller); err != nil {
		return err
	}
	if err := b.BindKubeadmBootstrap(ctx); err != nil {
		return err
	}
	if err := b.WriteKubeconfig(b.adminConfig, b.AdminUser()); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"apply", "-f", "../../packaging/kubernetes/crd.yaml"},
		{"wait", "--for=condition=Established", crdName},
	} {
		if out, err := b.RunKubectl(ctx, b.adminConfig, args...); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	b.client, err = client.New(b.AdminConfig(), client.Options{Scheme: newScheme()})
	shared = b
	return err
}

func newScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		panic(err)
	}
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		panic(err)
	}
	return scheme
}

// fleet is a controller with an inventory, and a maker of TPMs that it trusts.
type fleet struct {
	*bed
	namespace string
	inventory string
	maker     *swtpm.CA
	key       []byte
	config    controller.Config
	// cluster is the UID that challenges and records are for.
	cluster string
	// provider may wrap the provider tpm.
	provider func(tpmprovider.Provider) evidence.Provider
	tpm      tpmprovider.Provider
	// more are additional providers.
	more []evidence.Provider
	// ahead is added to the controller's clock.
	ahead atomic.Int64
	// caCertificate and caKey are the files of the CA that signs.
	caCertificate, caKey string
	stop                 func()
}

// newFleet starts a controller with an empty inventory. change may alter it before.
func newFleet(t *testing.T, change func(*fleet, *verifier.Policy)) *fleet {
	t.Helper()
	maker, err := swtpm.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	f := &fleet{
		bed: shared, maker: maker, key: make([]byte, 32), inventory: filepath.Join(dir, "inventory.yaml"),
	}
	fleets++
	f.namespace = fmt.Sprintf("fleet-%d", fleets)
	_, _ = rand.Read(f.key) // never fails
	f.cluster, f.provider = "cluster-uid", func(p tpmprovider.Provider) evidence.Provider { return p }
	t.Cleanup(func() { f.forget(t) })
	if err := f.client.Create(t.Context(), namespace(f.namespace)); err != nil {
		t.Fatal(err)
	}
	f.caCertificate, f.caKey = filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")
	keyPEM, err := f.ClientCA().KeyPEM()
	if err != nil {
		t.Fatal(err)
	}
	harness.WriteFile(t, f.caCertificate, f.ClientCA().CertPEM())
	harness.WriteFile(t, f.caKey, keyPEM)
	f.config = controller.Config{
		Machines:  sources.NewInventory(f.inventory, 0),
		CA:        signing.NewFiles(f.caCertificate, f.caKey),
		Limits:    signing.DefaultLimits(),
		Namespace: f.namespace,
		Now:       func() time.Time { return time.Now().Add(time.Duration(f.ahead.Load())) },
	}
	policy := verifier.Policy{
		Providers:    []verifier.Provider{{Name: tpm.Name, Challenges: true}},
		Signers:      []verifier.Signer{{Name: tpm.SignerName, Providers: []string{tpm.Name}}},
		Token:        verifier.Off,
		Credential:   verifier.Required,
		BootCounters: verifier.Warn,
		EKSources:    []verifier.EKSource{verifier.EKInventory},
		NameSources:  []verifier.NameSource{verifier.NameInventory},
	}
	if change != nil {
		change(f, &policy)
	}
	policy.Cluster = f.cluster
	if f.config.Rules, err = verifier.New(policy); err != nil {
		t.Fatal(err)
	}
	f.tpm = tpmprovider.Provider{Verifier: f.verifier(t)}
	f.config.Providers = append(f.more, f.provider(f.tpm))
	f.start(t)
	return f
}

// verifier returns a verifier that trusts the fleet's maker, except for the denied EKs.
func (f *fleet) verifier(t *testing.T, denied ...verifiertpm.Fingerprint) *verifiertpm.Verifier {
	t.Helper()
	v, err := verifiertpm.New(verifiertpm.Config{
		Roots: []*x509.Certificate{f.maker.Root}, Intermediates: []*x509.Certificate{f.maker.Intermediate}, NamedEKs: true,
		PCRs:       attestation.PCRSelection{Bank: "sha256", Indexes: []int{0, 1, 2, 3, 4, 5, 6, 7}},
		ClusterUID: f.cluster, DeniedEKs: denied,
		Keys: verifiertpm.Keys{Current: "k1", ByID: map[string][]byte{"k1": f.key}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func namespace(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// start runs a controller until the test ends, or stop is called.
func (f *fleet) start(t *testing.T) {
	t.Helper()
	f.stop = f.startWith(t, f.AdminConfig())
}

// startWith runs another with a client configuration.
func (f *fleet) startWith(t *testing.T, rest *rest.Config) (stop func()) {
	t.Helper()
	skip := true
	options := ctrl.Options{
		Scheme: newScheme(), Metrics: server.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: &skip},
	}
	own := f.config
	own.Requests = intake.NewRequestCache(own.Rules)
	own.Requests.Configure(&options.Cache)
	manager, err := ctrl.NewManager(rest, options)
	if err != nil {
		t.Fatal(err)
	}
	if err := controller.Add(manager, own); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- manager.Start(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("controller: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// forget removes all requests, so that the next test's controller does not see them.
func (f *fleet) forget(t *testing.T) {
	if err := f.client.DeleteAllOf(context.WithoutCancel(t.Context()), &certificatesv1.CertificateSigningRequest{}); err != nil {
		t.Error(err)
	}
}

// machine is a computer that the fleet's controller decides on.
type machine struct {
	*fleet
	name, dir string
	// program is the plugin, if not the fleet's.
	program   string
	chip      *swtpm.TPM
	bootstrap string
	token     string
	args      []string
}

// newMachine returns a machine whose TPM is of the fleet's maker.
func (f *fleet) newMachine(t *testing.T, name string) *machine {
	t.Helper()
	made := harness.NewMachine(t, f.plugin, name, swtpm.Options{Certified: []string{"ecc-p256"}, CA: f.maker})
	m := &machine{fleet: f, name: name, dir: made.Dir, program: f.plugin, chip: made.Chip, bootstrap: made.Bootstrap, token: f.newToken(t)}
	harness.WriteFile(t, m.bootstrap, f.BootstrapKubeconfig(m.token))
	return m
}

// computer returns the machine with its current settings.
func (m *machine) computer() *harness.Machine {
	computer := harness.MachineOf(m.dir, m.chip, m.program, m.name)
	computer.Bootstrap, computer.Args = m.bootstrap, m.args
	return computer
}

func (m *machine) flags() []string { return m.computer().Flags() }

func (m *machine) certs() cache.Dir { return m.computer().Certs() }

// removeState removes everything that the plugin remembers.
func (m *machine) removeState(t *testing.T) {
	t.Helper()
	m.computer().RemoveState(t)
}

// inventoried makes an inventory of the machines, by what identify prints on them.
func (f *fleet) inventoried(t *testing.T, machines ...*machine) {
	t.Helper()
	all := make([]*harness.Machine, len(machines))
	for i, m := range machines {
		all[i] = m.computer()
	}
	harness.WriteFile(t, f.inventory, harness.Inventory(t, all...))
}

func (m *machine) run(t *testing.T, extra ...string) harness.Result {
	t.Helper()
	return m.computer().Run(t, m.ControlPlane, extra...)
}

// enrols runs the plugin until it prints a certificate.
func (m *machine) enrols(t *testing.T) harness.Result {
	t.Helper()
	return m.computer().Enrols(t, m.ControlPlane)
}

// record returns the machine's record.
func (f *fleet) record(t *testing.T, name string) *v1alpha1.NodeAttestation {
	t.Helper()
	record := &v1alpha1.NodeAttestation{}
	if err := f.client.Get(t.Context(), client.ObjectKey{Namespace: f.namespace, Name: name}, record); err != nil {
		t.Fatal(err)
	}
	return record
}

// requests returns the requests that claim a node name.
func (f *fleet) requests(t *testing.T, name string) (hellos, proofs []certificatesv1.CertificateSigningRequest) {
	t.Helper()
	return harness.Requests(t, f.ControlPlane, name)
}
