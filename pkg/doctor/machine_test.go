// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
)

const (
	nodeName    = "worker-1"
	signerName  = "example.com/attested"
	token       = "abcdef.0123456789abcdef"
	kubeletPID  = 4242
	bindingsURL = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
	reviewURL   = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
)

// attestor is a provider with a device.
type attestor struct {
	renews   bool
	device   string // JSON
	err      error
	identify func(context.Context) // called first, if set
	allowed  string                // the remembered value that is allowed, all if it is empty
}

func (*attestor) Name() string                               { return "fake" }
func (*attestor) SignerName() string                         { return signerName }
func (a *attestor) Renews() bool                             { return a.renews }
func (*attestor) Caution() string                            { return "" }
func (*attestor) ProviderID(context.Context) (string, error) { return "", nil }
func (*attestor) Evidence(context.Context, provider.Request) ([]byte, error) {
	return nil, errors.New("not here")
}
func (*attestor) Explain([]byte) []provider.Fact                       { return nil }
func (*attestor) SelfTest(context.Context, func(provider.Check)) error { return nil }
func (*attestor) Versions() attestation.Versions                       { return nil }
func (*attestor) Hello(context.Context, provider.Request) ([]byte, string, error) {
	return nil, "", errors.New("not here")
}
func (a *attestor) Allows(remember string) bool { return a.allowed == "" || a.allowed == remember }
func (a *attestor) Identify(ctx context.Context) (any, error) {
	if a.identify != nil {
		a.identify(ctx)
	}
	return json.RawMessage(a.device), a.err
}

// deviceless is a provider without a device and without a challenge.
type deviceless struct{}

func (deviceless) Name() string                                               { return "deviceless" }
func (deviceless) SignerName() string                                         { return signerName }
func (deviceless) Renews() bool                                               { return false }
func (deviceless) Caution() string                                            { return "" }
func (deviceless) ProviderID(context.Context) (string, error)                 { return "", nil }
func (deviceless) Evidence(context.Context, provider.Request) ([]byte, error) { return nil, nil }

// instance is a provider whose evidence comes from a cloud's metadata service.
type instance struct {
	deviceless
	name string
	err  error
}

func (i instance) Name() string { return i.name }
func (instance) Renews() bool   { return true }
func (i instance) ProviderID(context.Context) (string, error) {
	return "cloud://" + i.name, i.err
}

// metadataService is a client of one that demands a token, as EC2's IMDSv2 does, unless m.tokenless
// is set.
func (m *machine) metadataService() metadata.Client {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !m.tokenless || r.URL.Path != "/latest/meta-data/" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	m.t.Cleanup(server.Close)
	return metadata.Client{Address: server.Listener.Addr().String()}
}

// instance returns the provider of a cloud's instance.
func (m *machine) instance(name string) provider.Factory {
	return provider.Factory{Name: name, New: func(provider.Settings) (provider.Provider, error) {
		return instance{name: name, err: m.metadataErr}, nil
	}}
}

// reply is the API server's answer for one path.
type reply struct {
	status int
	body   string
}

// machine is a node without problems, until a test changes it.
type machine struct {
	t                           *testing.T
	root, proc, conf, bootstrap string
	command                     string
	kubeletConfig               string
	certs                       cache.Dir
	config                      authenticator.Config
	configErr                   error
	attestor                    *attestor
	metadataErr                 error // of the cloud's metadata service
	tokenless                   bool  // whether that service answers without a token
	choose                      func(context.Context, provider.Settings) (name, why string)
	now                         func() time.Time
	server                      *httptest.Server
	cluster                     cache.Origin
	ca                          *x509.Certificate
	caKey                       *ecdsa.PrivateKey
	timeout                     time.Duration

	mu       sync.Mutex
	replies  map[string]reply // by method and path; a path that ends with / matches all paths below
	requests []string         // method, path and query
	created  []string         // spec.signerName of the created requests
}

// unhurried is a time limit that no run of these tests reaches.
const unhurried = time.Minute

func newMachine(t *testing.T) *machine {
	root := t.TempDir()
	m := &machine{
		t: t, root: root, proc: filepath.Join(root, "proc"), conf: filepath.Join(root, "kubelet.conf"), bootstrap: filepath.Join(root, "bootstrap-kubelet.conf"),
		command: filepath.Join(root, "kubelet-authenticator"), kubeletConfig: filepath.Join(root, "kubelet-config.yaml"),
		certs:    cache.At(filepath.Join(root, "certs")),
		attestor: &attestor{renews: true, device: `{"manufacturer":"IBM","firmware":"1.2","eks":[{"template":"ecc-p256","certificate":{"notAfter":"2036-01-01T00:00:00Z"}}]}`},
		now:      time.Now, replies: map[string]reply{}, timeout: unhurried,
	}
	m.config = authenticator.DefaultConfig()
	m.config.Provider, m.config.CertDir, m.config.RuntimeDir = "fake", m.certs.Path(), filepath.Join(root, "run")
	m.config.KubeletKubeconfig, m.config.KubeletBootstrapKubeconfig = m.conf, m.bootstrap
	m.ca, m.caKey = newCA(t)
	m.serve()
	m.write(m.command, "#!/bin/sh\n", 0o755)
	m.write(m.kubeletConfig, "rotateCertificates: true\n", 0o644) // the flag overrides it
	m.run("--kubeconfig="+m.conf, "--config="+m.kubeletConfig, "--rotate-certificates=false", "--hostname-override="+nodeName)
	m.writeConf()
	m.install(nodeName, time.Now().Add(-time.Hour), time.Now().Add(23*time.Hour))
	m.setState(cache.State{Issued: time.Now().Add(-time.Hour), Last: &cache.Result{
		Request: "node-csr-a", Finished: time.Now().Add(-time.Hour), Phases: []cache.Phase{{Name: string(enrol.StepChallenge), Milliseconds: 12}},
	}})
	return m
}

func newCA(t *testing.T) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: time.Now().Add(240 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return ca, key
}

func pemOf(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// issue returns a certificate and its key in PEM.
func (m *machine) issue(template *x509.Certificate) (certificate, key []byte) {
	m.t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		m.t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	der, err := x509.CreateCertificate(rand.Reader, template, m.ca, private.Public(), m.caKey)
	if err != nil {
		m.t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		m.t.Fatal(err)
	}
	return pemOf("CERTIFICATE", der), pemOf("PRIVATE KEY", keyDER)
}

// serve starts an API server whose certificate is valid for these bounds, from yesterday to
// tomorrow if there are none.
func (m *machine) serve(bounds ...time.Time) {
	m.t.Helper()
	if len(bounds) == 0 {
		bounds = []time.Time{time.Now().Add(-24 * time.Hour), time.Now().Add(24 * time.Hour)}
	}
	certificate, key := m.issue(&x509.Certificate{
		Subject: pkix.Name{CommonName: "api"}, DNSNames: []string{"api.example.com"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotBefore: bounds[0], NotAfter: bounds[1],
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		m.t.Fatal(err)
	}
	m.server = httptest.NewUnstartedServer(http.HandlerFunc(m.answer))
	m.server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequestClientCert}
	m.server.Config.ErrorLog = log.New(io.Discard, "", 0)
	m.server.StartTLS()
	m.t.Cleanup(m.server.Close)
	m.cluster = cache.Origin{Server: m.server.URL, CertificateAuthorityData: pemOf("CERTIFICATE", m.ca.Raw)}
}

// answer serves requests as an API server that accepts the node's certificate and the token, and
// grants the rights that a node needs.
func (m *machine) answer(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.requests = append(m.requests, r.Method+" "+r.URL.RequestURI())
	user := ""
	if certificates := r.TLS.PeerCertificates; len(certificates) > 0 {
		user = certificates[0].Subject.CommonName
	}
	if r.Header.Get("Authorization") == "Bearer "+token {
		user = "system:bootstrap:abcdef"
	}
	send := func(status int, body string) {
		w.WriteHeader(status)
		_, _ = fmt.Fprint(w, body)
	}
	for pattern, canned := range m.replies {
		method, path, _ := strings.Cut(pattern, " ")
		watch := strings.HasSuffix(path, "?watch")
		path = strings.TrimSuffix(path, "?watch")
		if method == r.Method && (path == r.URL.Path && watch == r.URL.Query().Has("watch") || strings.HasSuffix(path, "/") && strings.HasPrefix(r.URL.Path, path)) {
			send(canned.status, canned.body)
			return
		}
	}
	switch {
	case r.URL.Path == "/version":
		send(200, `{}`)
	case user == "":
		send(401, `{"kind":"Status","message":"Unauthorized"}`)
	case r.URL.Path == reviewURL:
		send(201, `{"status":{"userInfo":{"username":"`+user+`"}}}`)
	case r.URL.Path == csrPath && r.Method == http.MethodPost:
		var object struct {
			Spec struct {
				SignerName string `json:"signerName"`
				Request    []byte `json:"request"`
			} `json:"spec"`
		}
		if json.NewDecoder(r.Body).Decode(&object) != nil || r.URL.Query().Get("dryRun") != "All" {
			send(500, `{"message":"not a dry run"}`)
			return
		}
		if _, err := attestation.Parse(object.Spec.Request); err != nil {
			send(422, `{"message":"malformed"}`)
			return
		}
		m.created = append(m.created, object.Spec.SignerName)
		send(201, `{}`)
	case r.URL.Path == csrPath && r.URL.Query().Has("watch"):
		send(200, "")
	case r.URL.Path == csrPath:
		send(200, `{"items":[]}`)
	case r.Method == http.MethodPatch && "system:node:"+strings.TrimPrefix(r.URL.Path, "/api/v1/nodes/") == user && r.Header.Get("Content-Type") == "application/merge-patch+json":
		send(200, `{}`)
	case strings.HasPrefix(r.URL.Path, csrPath+"/"):
		send(404, `{"message":"not found"}`)
	default:
		send(403, `{"message":"forbidden: User \"`+user+`\" cannot"}`)
	}
}

func (m *machine) write(path, content string, mode os.FileMode) {
	m.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600), os.Chmod(path, mode)); err != nil {
		m.t.Fatal(err)
	}
}

// fifo replaces a file by a fifo.
func (m *machine) fifo(path string) {
	m.t.Helper()
	if err := errors.Join(os.RemoveAll(path), syscall.Mkfifo(path, 0o600)); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) chmod(path string, mode os.FileMode) {
	m.t.Helper()
	if err := os.Chmod(path, mode); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) remove(path string) {
	m.t.Helper()
	if err := os.RemoveAll(path); err != nil {
		m.t.Fatal(err)
	}
}

// process puts a process into the fake proc file system.
func (m *machine) process(pid int, comm string, args ...string) {
	m.t.Helper()
	dir := filepath.Join(m.proc, strconv.Itoa(pid))
	line := ""
	if len(args) > 0 {
		line = strings.Join(args, "\x00") + "\x00"
	}
	m.write(filepath.Join(dir, "comm"), comm+"\n", 0o644)
	m.write(filepath.Join(dir, "cmdline"), line, 0o444)
	m.remove(filepath.Join(dir, "cwd"))
	if err := os.Symlink(m.root, filepath.Join(dir, "cwd")); err != nil {
		m.t.Fatal(err)
	}
}

// run adds a kubelet with these flags, among other processes.
func (m *machine) run(flags ...string) {
	m.t.Helper()
	m.process(1, "systemd", "/sbin/init")
	m.process(77, "kubelet") // a zombie
	m.process(99, "sh", "sh", "-c", "kubelet --bootstrap-kubeconfig=/x")
	m.process(kubeletPID, "kubelet", append([]string{"/usr/bin/kubelet"}, flags...)...)
	m.write(filepath.Join(m.proc, "uptime"), "1 1\n", 0o444)
}

// started sets the start time of the kubelet in the fake proc file system.
func (m *machine) started(at time.Time) {
	m.t.Helper()
	const uptime = 1000
	boot := at.Add(-uptime * time.Second)
	m.write(filepath.Join(m.proc, "stat"), fmt.Sprintf("cpu  1 2 3\nbtime %d\nprocesses 5\n", boot.Unix()), 0o444)
	m.write(filepath.Join(m.proc, strconv.Itoa(kubeletPID), "stat"), fmt.Sprintf("%d (a ) 1 b) S%s %d 0 0\n", kubeletPID, strings.Repeat(" 7", 18), uptime*100), 0o444)
}

// age sets the modification time of a file.
func (m *machine) age(path string, ago time.Duration) {
	m.t.Helper()
	at := time.Now().Add(-ago)
	if err := os.Chtimes(path, at, at); err != nil {
		m.t.Fatal(err)
	}
}

// writeConf writes the kubelet's kubeconfig as prepare does, with replacements.
func (m *machine) writeConf(replacements ...string) {
	m.t.Helper()
	content, err := kubelet.RenderKubeconfig(m.cluster, kubelet.Exec{Command: m.command})
	if err != nil {
		m.t.Fatal(err)
	}
	after := strings.NewReplacer(replacements...).Replace(string(content))
	if len(replacements) > 0 && after == string(content) {
		m.t.Fatalf("nothing to replace in\n%s", content)
	}
	m.write(m.conf, after, 0o600)
}

// writeOverwritten writes what the kubelet writes after its own bootstrap.
func (m *machine) writeOverwritten() {
	m.t.Helper()
	m.write(m.conf, m.kubeconfig("default-cluster", "default-auth", "{client-certificate: "+kubelet.RotatedFile+", client-key: "+kubelet.RotatedFile+"}"), 0o600)
}

// writeDropIn writes the drop-in of the kubelet's unit.
func (m *machine) writeDropIn() {
	m.t.Helper()
	m.write(filepath.Join(m.root, "kubelet.service.d", "20-kubelet-authenticator.conf"), "", 0o644)
}

func (m *machine) kubeconfig(cluster, user, credential string) string {
	ca, err := json.Marshal(m.cluster.CertificateAuthorityData)
	if err != nil {
		m.t.Fatal(err)
	}
	return fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: %s, user: %s}}],
  clusters: [{name: %s, cluster: {server: %q, certificate-authority-data: %s}}], users: [{name: %s, user: %s}]}`,
		cluster, user, cluster, m.cluster.Server, ca, user, credential)
}

func (m *machine) writeBootstrap(credential string) {
	m.t.Helper()
	m.write(m.bootstrap, m.kubeconfig("kubernetes", "tls-bootstrap", credential), 0o600)
}

// withLock lets f write into the certificate directory.
func (m *machine) withLock(f func(*cache.Lock) error) {
	m.t.Helper()
	lock, err := m.certs.TryLock()
	if err != nil {
		m.t.Fatal(err)
	}
	defer lock.Unlock()
	if err := f(lock); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) setState(state cache.State) {
	m.t.Helper()
	m.withLock(func(l *cache.Lock) error { return l.SetState(&state) })
}

func (m *machine) setPending(age time.Duration, hello bool, uid string) {
	m.t.Helper()
	pending := cache.Pending{
		Provider: "fake", NodeName: nodeName, SignerName: signerName, Cluster: m.cluster, Key: []byte("SECRETKEY"),
		Requests: []cache.PendingRequest{{Name: "node-csr-b", Hello: hello, UID: uid, Request: []byte("r"), FiledAt: time.Now().Add(-age)}},
	}
	m.withLock(func(l *cache.Lock) error { return l.SetPending(&pending) })
}

func (m *machine) install(name string, notBefore, notAfter time.Time) {
	m.t.Helper()
	certificate, key := m.issue(&x509.Certificate{
		Subject: pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:" + name}, NotBefore: notBefore, NotAfter: notAfter,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	pair, err := cache.ParsePair(append(bytes.Clone(certificate), key...))
	if err != nil {
		m.t.Fatal(err)
	}
	pair.Origin = &m.cluster
	m.withLock(func(l *cache.Lock) error { return l.Install(pair) })
}

// bare is a machine before its first certificate, with a token.
func (m *machine) bare() {
	m.t.Helper()
	m.remove(m.certs.Path())
	m.writeBootstrap("{token: " + token + "}")
}

func (m *machine) options() Options {
	return Options{
		Config: m.config, ConfigFile: filepath.Join(m.root, "config.yaml"), ConfigErr: m.configErr, Proc: m.proc, Now: m.now, Timeout: m.timeout,
		Manifests: filepath.Join(m.root, "manifests"), UserAgent: "test", UnitDirs: []string{filepath.Join(m.root, "kubelet.service.d")},
		Choose: m.choose, Metadata: m.metadataService(),
		Providers: []provider.Factory{
			{Name: "fake", New: func(provider.Settings) (provider.Provider, error) { return m.attestor, nil }},
			{Name: "deviceless", New: func(provider.Settings) (provider.Provider, error) { return deviceless{}, nil }},
			m.instance("ec2"), m.instance("ec2-role"), m.instance("gce"), m.instance("azure"),
		},
	}
}

// tree describes all files below root.
func tree(t *testing.T, root string) string {
	t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintln(&out, path, info.Mode(), info.ModTime(), info.Size())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// examine runs all checks. They must change no file and show no secret, whatever the results are.
func (m *machine) examine() map[string]checkup.Result {
	m.t.Helper()
	before := tree(m.t, m.root)
	report := Run(m.t.Context(), m.options())
	if after := tree(m.t, m.root); after != before {
		m.t.Errorf("it changed\n%s\nto\n%s", before, after)
	}
	text := report.Text()
	for _, secret := range []string{token, strings.Split(token, ".")[1], "SECRETKEY", "U0VDUkVUS0VZ", "PRIVATE KEY"} {
		if strings.Contains(text, secret) {
			m.t.Errorf("it shows %s:\n%s", secret, text)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, request := range m.requests {
		dryRun := strings.HasSuffix(request, "?dryRun=All")
		if (strings.HasPrefix(request, "POST "+csrPath) || strings.HasPrefix(request, "POST /api/v1/nodes")) && !dryRun || strings.HasPrefix(request, "PUT") || strings.HasPrefix(request, "PATCH") && !dryRun || strings.HasPrefix(request, "DELETE") {
			m.t.Errorf("it changes something: %s", request)
		}
	}
	results := map[string]checkup.Result{}
	worst := checkup.OK
	for _, r := range report.Checks {
		results[r.Name] = r
		if order := []checkup.Status{checkup.OK, checkup.Warning, checkup.Failure}; slices.Index(order, r.Status) > slices.Index(order, worst) {
			worst = r.Status
		}
		if strings.ContainsFunc(r.Message+r.Remedy, unicode.IsControl) {
			m.t.Errorf("a control character: %+q", r)
		}
		if r.Message == "" || r.Status == checkup.Failure && r.Remedy == "" || r.Status == checkup.OK && r.Remedy != "" {
			m.t.Errorf("not a whole result: %+v", r)
		}
	}
	if len(results) != len(Checks()) || report.Status != worst {
		m.t.Errorf("%d results of %d, status %s, the worst is %s", len(results), len(Checks()), report.Status, worst)
	}
	return results
}

// list is a list of requests as the API server sends it.
func list(t *testing.T, items ...any) string {
	t.Helper()
	data, err := json.Marshal(map[string]any{"items": items, "metadata": metav1.ListMeta{}})
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
