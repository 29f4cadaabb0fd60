// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// APIServer is one of a control plane's API servers: its own, or one of AddAPIServer.
type APIServer struct {
	cp      *ControlPlane
	addr    string // host:port
	command Command
	client  *kubernetes.Clientset

	process *Process // guarded by cp.mu; nil while it is stopped
}

// APIServer returns the control plane's own API server, the one at ServerURL.
func (cp *ControlPlane) APIServer() *APIServer { return cp.own }

// AddAPIServer starts one more API server for the same objects, like that of a second control plane
// node. It has the same etcd, authorities, service account keys and flags. extraArgs are added; of
// a flag given twice the last one counts. --authorization-config takes the place of the modes Node
// and RBAC. It returns when requests work. Stop of the control plane stops it, too. Its audit log
// is beside the first one's; Audit does not read it.
func (cp *ControlPlane) AddAPIServer(ctx context.Context, extraArgs ...string) (*APIServer, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	cp.mu.Lock()
	defer cp.mu.Unlock()
	if cp.stopped {
		return nil, errors.New("add an API server: the control plane is stopped")
	}
	s, err := cp.newAPIServer(extraArgs)
	if err != nil {
		return nil, err
	}
	cp.apiServers = append(cp.apiServers, s)
	return s, s.run(ctx)
}

// newAPIServer makes one that is not started.
func (cp *ControlPlane) newAPIServer(extraArgs []string) (*APIServer, error) {
	addr, port, err := cp.takePort()
	if err != nil {
		return nil, err
	}
	host, services := "127.0.0.1", "10.96.0.0/24"
	if cp.ipv6 {
		host, services = "::1", "fd00:10:96::/112"
		addr = net.JoinHostPort(host, port)
	}
	audit, log := auditLog, "kube-apiserver.log"
	if n := len(cp.apiServers); n > 0 {
		audit, log = fmt.Sprintf("audit-%d.log", n+1), fmt.Sprintf("kube-apiserver-%d.log", n+1)
	}
	args := []string{
		"--etcd-servers=" + cp.etcdURL,
		"--bind-address=" + host,
		"--advertise-address=" + host,
		"--secure-port=" + port,
		"--endpoint-reconciler-type=none",
		"--tls-cert-file=" + cp.path("serving.crt"),
		"--tls-private-key-file=" + cp.path("serving.key"),
		"--client-ca-file=" + cp.path("client-ca.crt"),
		"--enable-admission-plugins=NodeRestriction",
		"--enable-bootstrap-token-auth=true",
		"--service-account-issuer=" + serviceAccounts,
		"--service-account-key-file=" + cp.path("tokens.key"),
		"--service-account-signing-key-file=" + cp.path("tokens.key"),
		"--service-cluster-ip-range=" + services,
		"--audit-policy-file=" + cp.path("audit-policy.yaml"),
		"--audit-log-path=" + cp.path(audit),
		"--audit-log-format=json",
		"--audit-log-mode=blocking",
		"--audit-log-maxsize=10000", // MB; Audit reads one file, so do not rotate
	}
	extraArgs = slices.Concat(cp.apiServerArgs, extraArgs)
	// An API server takes either the file or the modes.
	if !slices.ContainsFunc(extraArgs, isAuthorizationConfig) {
		args = append(args, "--authorization-mode=Node,RBAC")
	}
	s := &APIServer{cp: cp, addr: addr}
	s.command = Command{
		Path:    cp.components.APIServer,
		Args:    append(args, extraArgs...),
		LogFile: cp.path(log),
	}
	if s.client, err = kubernetes.NewForConfig(s.AdminConfig()); err != nil {
		return nil, fmt.Errorf("make the admin client: %w", err)
	}
	return s, nil
}

func isAuthorizationConfig(arg string) bool {
	return strings.HasPrefix(arg, "--authorization-config=")
}

// URL returns the API server's URL.
func (s *APIServer) URL() string { return "https://" + s.addr }

// Client returns a client of a member of system:masters.
func (s *APIServer) Client() kubernetes.Interface { return s.client }

// AdminConfig returns a client configuration of a member of system:masters, without a client-side
// rate limit. It is the caller's own copy.
func (s *APIServer) AdminConfig() *rest.Config {
	return &rest.Config{
		Host: s.URL(),
		TLSClientConfig: rest.TLSClientConfig{
			CAData:   s.cp.ServerCA(),
			CertData: s.cp.admin.CertPEM,
			KeyData:  s.cp.admin.KeyPEM,
		},
		QPS: -1,
	}
}

// Kubeconfig returns a kubeconfig with this user for this API server.
func (s *APIServer) Kubeconfig(user *clientcmdapi.AuthInfo) []byte {
	return s.cp.Kubeconfig(user, WithServer(s.URL()))
}

// PID returns the process ID, 0 while it is stopped.
func (s *APIServer) PID() int {
	s.cp.mu.Lock()
	defer s.cp.mu.Unlock()
	if s.process == nil {
		return 0
	}
	return s.process.PID()
}

// Stop ends the API server as a crash does. No other process gets its port. A second call does
// nothing.
func (s *APIServer) Stop() error {
	s.cp.mu.Lock()
	defer s.cp.mu.Unlock()
	return s.kill()
}

// Start starts it again where it was, and returns when requests work.
func (s *APIServer) Start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	s.cp.mu.Lock()
	defer s.cp.mu.Unlock()
	if s.cp.stopped || s.process != nil {
		return errors.New("start the API server: it is running, or the control plane is stopped")
	}
	return s.run(ctx)
}

func (s *APIServer) kill() error {
	if s.process == nil {
		return nil
	}
	process := s.process
	s.process = nil
	return process.Kill()
}

// run starts the process, and returns when it is ready.
func (s *APIServer) run(ctx context.Context) (err error) {
	if s.process, err = StartProcess(s.command); err != nil {
		return err
	}
	return pollWhile(ctx, s.process, "the API server", func(ctx context.Context) error {
		if err := s.client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error(); err != nil {
			return err
		}
		// Made in the background, and no part of /readyz.
		_, err := s.client.CoreV1().Namespaces().Get(ctx, systemNamespace, metav1.GetOptions{})
		return err
	})
}
