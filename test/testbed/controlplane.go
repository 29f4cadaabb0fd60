// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/keyutil"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

const (
	// Measured 2 to 4 s on two cores; the rest is for a busy machine.
	startTimeout    = 90 * time.Second
	adminValidity   = 24 * time.Hour
	defaultSigning  = time.Hour
	serviceAccounts = "https://kubernetes.default.svc"
	// etcdData is etcd's data directory.
	etcdData = "etcd"
)

// Options say how a control plane differs from the usual one. The zero value
// is fine.
type Options struct {
	// Components to use; nil means those of compile.ControlPlane.
	Components *compile.Components
	// Progress is given to compile.ControlPlane; nil means no output.
	Progress io.Writer
	// Dir takes all files and is kept by Stop. Empty means a temporary folder,
	// which Stop removes.
	Dir string
	// ClusterSigningDuration is how long certificates live that the controller
	// manager signs; zero means an hour.
	ClusterSigningDuration time.Duration
	// AuditPolicy replaces the one that Audit's comment describes.
	AuditPolicy []byte
	// APIServerArgs are added to the API server's; of a flag given twice the
	// last one counts.
	APIServerArgs []string
	// EtcdArgs are added to etcd's, in the same way.
	EtcdArgs []string
	// OneCA has one authority for servers and clients, as a cluster of kubeadm's has.
	OneCA bool
	// IPv6 has the API servers listen on ::1 alone, in a cluster whose services have IPv6
	// addresses.
	IPv6 bool
	// AnyTime makes machines trust the API server with any time on their clock: its certificate and
	// its CA are valid from 1960 to 2100.
	AnyTime bool
	// Etcd is another control plane, to be stopped later, whose etcd this one uses, under a prefix
	// of its own. Nil starts one.
	Etcd *ControlPlane
}

// ControlPlane is a running etcd and kube-apiserver, and after
// StartControllerManager a kube-controller-manager.
type ControlPlane struct {
	components      compile.Components
	dir             string
	ownDir          bool
	signingDuration time.Duration

	// Two authorities, as a client that trusts a server because of the CA which
	// issued its own certificate would go unnoticed with one.
	serverCA *CA
	clientCA *CA

	ports  []*Port // freed by Stop
	admin  KeyPair
	own    *APIServer
	client *kubernetes.Clientset // of its own API server

	etcdURL       string
	etcdCommand   Command  // Restore starts it again
	apiServerArgs []string // added to each API server's
	ipv6          bool     // what Options say

	mu                sync.Mutex   // guards what follows
	etcd              *Process     // nil where it is another's
	apiServers        []*APIServer // its own, and those of AddAPIServer
	controllerManager *Process
	stopped           bool
}

// Start starts etcd and the API server and returns when requests and RBAC's default roles work. If
// it fails, it stops everything that it started.
func Start(ctx context.Context, opts Options) (_ *ControlPlane, err error) {
	components := opts.Components
	if components == nil {
		built, err := compile.ControlPlane(ctx, opts.Progress)
		if err != nil {
			return nil, fmt.Errorf("build the components: %w", err)
		}
		components = &built
	}
	// The time limit is for starting: a cold build takes minutes.
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()

	cp := &ControlPlane{
		components:      *components,
		dir:             opts.Dir,
		signingDuration: opts.ClusterSigningDuration,
	}
	if cp.signingDuration == 0 {
		cp.signingDuration = defaultSigning
	}
	if cp.dir == "" {
		cp.ownDir = true
		if cp.dir, err = os.MkdirTemp("", "testbed-"); err != nil {
			return nil, fmt.Errorf("make the control plane's folder: %w", err)
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, cp.Stop())
		}
	}()

	if err := cp.writeFiles(opts); err != nil {
		return nil, err
	}
	cp.apiServerArgs, cp.ipv6 = opts.APIServerArgs, opts.IPv6
	if opts.Etcd != nil {
		cp.etcdURL = opts.Etcd.etcdURL
		cp.apiServerArgs = append([]string{"--etcd-prefix=/" + rand.Text()}, cp.apiServerArgs...)
	} else if err := cp.startEtcd(ctx, opts.EtcdArgs); err != nil {
		return nil, err
	}
	if cp.own, err = cp.AddAPIServer(ctx); err != nil {
		return nil, err
	}
	cp.client = cp.own.client
	return cp, nil
}

// Stop ends all processes and removes the temporary folder. It returns an error if a component had
// already ended unexpectedly. A second call does nothing.
func (cp *ControlPlane) Stop() error {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	if cp.stopped {
		return nil
	}
	cp.stopped = true
	var errs []error
	// No data is kept, so an orderly shutdown has no benefit. The API server would wait until all
	// watches have ended.
	if cp.controllerManager != nil {
		errs = append(errs, cp.controllerManager.Kill())
	}
	for _, s := range cp.apiServers {
		errs = append(errs, s.kill())
	}
	if cp.etcd != nil {
		errs = append(errs, cp.etcd.Kill())
	}
	for _, p := range cp.ports {
		p.Free()
	}
	if cp.ownDir {
		errs = append(errs, os.RemoveAll(cp.dir))
	}
	return errors.Join(errs...)
}

// takePort returns a port for a component. No other process gets that port before Stop.
func (cp *ControlPlane) takePort() (addr, port string, err error) {
	p, err := TakePort()
	if err != nil {
		return "", "", err
	}
	cp.ports = append(cp.ports, p)
	if _, port, err = net.SplitHostPort(p.Addr()); err != nil {
		return "", "", fmt.Errorf("split %s: %w", p.Addr(), err)
	}
	return p.Addr(), port, nil
}

// ServerURL returns the API server's URL.
func (cp *ControlPlane) ServerURL() string { return cp.own.URL() }

// EtcdURL returns etcd's URL, for what no API server lets anybody write.
func (cp *ControlPlane) EtcdURL() string { return cp.etcdURL }

// ServerCA returns the authority of the serving certificate, PEM.
func (cp *ControlPlane) ServerCA() []byte { return cp.serverCA.CertPEM() }

// ClientCA returns the authority whose client certificates the API server
// accepts. It is also the one the controller manager signs with.
func (cp *ControlPlane) ClientCA() *CA { return cp.clientCA }

// Client returns a client of a member of system:masters.
func (cp *ControlPlane) Client() kubernetes.Interface { return cp.client }

// KubernetesVersion returns the version of the API server, for example "v1.37.2".
func (cp *ControlPlane) KubernetesVersion() string { return cp.components.KubernetesVersion }

// Kubectl returns the path of kubectl.
func (cp *ControlPlane) Kubectl() string { return cp.components.Kubectl }

// Dir returns the folder with all files of the control plane.
func (cp *ControlPlane) Dir() string { return cp.dir }

// AdminConfig returns a client configuration of a member of system:masters,
// without a client-side rate limit. It is the caller's own copy.
func (cp *ControlPlane) AdminConfig() *rest.Config { return cp.own.AdminConfig() }

// Logs returns the ends of the components' logs, for the message of a failed
// test.
func (cp *ControlPlane) Logs() string {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	var b strings.Builder
	processes := []*Process{cp.etcd, cp.controllerManager}
	for _, s := range cp.apiServers {
		processes = append(processes, s.process)
	}
	for _, p := range processes {
		if p != nil {
			b.WriteString(p.LogTail())
		}
	}
	return b.String()
}

func (cp *ControlPlane) path(name string) string { return filepath.Join(cp.dir, name) }

func (cp *ControlPlane) write(name string, data []byte) error {
	if err := os.WriteFile(cp.path(name), data, 0o600); err != nil {
		return fmt.Errorf("write the control plane's %s: %w", name, err)
	}
	return nil
}

// writeFiles makes both authorities and every file the components read.
func (cp *ControlPlane) writeFiles(opts Options) error {
	var err error
	newServerCA := NewCA
	if opts.AnyTime {
		newServerCA = newCAForAnyTime
	}
	if cp.serverCA, err = newServerCA("testbed-server-ca"); err != nil {
		return err
	}
	if cp.clientCA, err = NewCA("testbed-client-ca"); err != nil {
		return err
	}
	if opts.OneCA {
		cp.clientCA = cp.serverCA
	}
	now := time.Now()
	notBefore, notAfter := now.Add(-time.Hour), now.Add(serverValidity)
	if opts.AnyTime {
		notBefore, notAfter = anyTime[0], anyTime[1]
	}
	serving, err := cp.serverCA.issueServer(
		[]string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"},
		[]net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}, notBefore, notAfter)
	if err != nil {
		return err
	}
	if cp.admin, err = cp.clientCA.IssueClient("testbed-admin", []string{"system:masters"}, now.Add(-time.Hour), now.Add(adminValidity)); err != nil {
		return err
	}
	clientCAKey, err := cp.clientCA.KeyPEM()
	if err != nil {
		return fmt.Errorf("encode the client CA's key: %w", err)
	}
	tokenKey, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return fmt.Errorf("make the service accounts' key: %w", err)
	}
	auditPolicy := opts.AuditPolicy
	if auditPolicy == nil {
		auditPolicy = []byte(defaultAuditPolicy)
	}
	for name, data := range map[string][]byte{
		"serving.crt":       serving.CertPEM,
		"serving.key":       serving.KeyPEM,
		"client-ca.crt":     cp.clientCA.CertPEM(),
		"client-ca.key":     clientCAKey,
		"tokens.key":        tokenKey,
		"audit-policy.yaml": auditPolicy,
	} {
		if err := cp.write(name, data); err != nil {
			return err
		}
	}
	return nil
}

func (cp *ControlPlane) startEtcd(ctx context.Context, extra []string) error {
	addr, _, err := cp.takePort()
	if err != nil {
		return err
	}
	cp.etcdURL = "http://" + addr
	cp.etcdCommand = Command{
		Path: cp.components.Etcd,
		Args: append([]string{
			"--data-dir=" + cp.path(etcdData),
			"--listen-client-urls=" + cp.etcdURL,
			"--advertise-client-urls=" + cp.etcdURL,
			"--listen-peer-urls=http://127.0.0.1:0", // it has no peers
			"--unsafe-no-fsync",
			"--log-level=warn",
			// It elects itself after this time, since it has no competitor.
			"--heartbeat-interval=10",
			"--election-timeout=100",
		}, extra...),
		LogFile: cp.path("etcd.log"),
	}
	return cp.runEtcd(ctx)
}

// runEtcd starts etcd, and returns when it answers.
func (cp *ControlPlane) runEtcd(ctx context.Context) (err error) {
	if cp.etcd, err = StartProcess(cp.etcdCommand); err != nil {
		return err
	}
	return pollWhile(ctx, cp.etcd, "etcd", func(ctx context.Context) error {
		return getOK(ctx, http.DefaultClient, cp.etcdURL+"/health")
	})
}

// getOK succeeds if the URL answers with 200.
func getOK(ctx context.Context, client *http.Client, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(io.LimitReader(answer.Body, logTailBytes))
	if err := errors.Join(err, answer.Body.Close()); err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", url, answer.Status, body)
	}
	return nil
}
