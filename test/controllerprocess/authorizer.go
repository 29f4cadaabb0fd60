// SPDX-License-Identifier: Apache-2.0

package controllerprocess

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// AuthorizerUser is the user as which the authorizer reads the cluster's objects.
// packaging/authorizer/rbac.yaml has the rights of this user.
const AuthorizerUser = "node-attestation-authorizer"

// authorizerValidity is how long the certificates of the authorizer and its clients are valid.
const authorizerValidity = 24 * time.Hour

// Authorizer runs node-attestation-controller authorizer for one API server. It can be started,
// ended, and started again. Its methods are for one goroutine at a time.
type Authorizer struct {
	dir, binary string
	// listen and health stay reserved while no process runs.
	listen, health *testbed.Port
	// Serving is the certificate that the API server expects at Addr.
	Serving testbed.KeyPair
	process *testbed.Process
}

// InstallAuthorizer applies the rights of AuthorizerUser, after InstallRevocation.
func InstallAuthorizer(ctx context.Context, cp *testbed.ControlPlane, module string) error {
	admin := filepath.Join(cp.Dir(), "authorizer.kubeconfig")
	if err := cp.WriteKubeconfig(admin, cp.AdminUser()); err != nil {
		return err
	}
	_, err := cp.RunKubectl(ctx, admin, "apply", "--server-side", "--validate=strict", "--filename="+filepath.Join(module, "packaging", "authorizer", "rbac.yaml"))
	return err
}

// AuthorizerKubeconfig is a kubeconfig of AuthorizerUser for an API server.
func AuthorizerKubeconfig(cp *testbed.ControlPlane, server *testbed.APIServer) ([]byte, error) {
	pair, err := cp.ClientCA().IssueClient(AuthorizerUser, nil, time.Now().Add(-time.Hour), time.Now().Add(authorizerValidity))
	if err != nil {
		return nil, err
	}
	return server.Kubeconfig(testbed.CertificateUser(pair)), nil
}

// NewAuthorizer writes the files of an authorizer and of its API server into a folder, which
// exists. Only these two trust the authority of their certificates.
func NewAuthorizer(module, dir, binary string) (_ *Authorizer, err error) {
	a := &Authorizer{dir: dir, binary: binary}
	if a.listen, err = testbed.TakePort(); err != nil {
		return nil, err
	}
	if a.health, err = testbed.TakePort(); err != nil {
		return nil, err
	}
	ca, err := testbed.NewCA("authorizer")
	if err != nil {
		return nil, err
	}
	if a.Serving, err = ca.IssueServer(nil, []net.IP{net.IPv4(127, 0, 0, 1)}); err != nil {
		return nil, err
	}
	apiServer, err := ca.IssueClient("kube-apiserver", nil, time.Now().Add(-time.Hour), time.Now().Add(authorizerValidity))
	if err != nil {
		return nil, err
	}
	for name, data := range map[string][]byte{
		"tls.crt": a.Serving.CertPEM, "tls.key": a.Serving.KeyPEM, "ca.crt": ca.CertPEM(),
		"api-server.crt": apiServer.CertPEM, "api-server.key": apiServer.KeyPEM,
	} {
		if err := os.WriteFile(a.path(name), data, 0o600); err != nil {
			return nil, err
		}
	}
	return a, errors.Join(
		a.place(module, "authorization.yaml", "/etc/kubernetes/authorization/", dir+"/"),
		a.place(module, "webhook.kubeconfig",
			"/etc/kubernetes/authorization/authorizer.crt", a.path("ca.crt"),
			"/etc/kubernetes/pki/front-proxy-client.", a.path("api-server."),
			"127.0.0.1:10360", a.Addr()))
}

// place copies a file of packaging/authorizer, with paths and addresses of this test bed.
func (a *Authorizer) place(module, name string, oldNew ...string) error {
	shipped, err := os.ReadFile(filepath.Join(module, "packaging", "authorizer", name))
	if err != nil {
		return err
	}
	for i := 0; i < len(oldNew); i += 2 {
		if !strings.Contains(string(shipped), oldNew[i]) {
			return fmt.Errorf("packaging/authorizer/%s does not have %s", name, oldNew[i])
		}
	}
	return os.WriteFile(a.path(name), []byte(strings.NewReplacer(oldNew...).Replace(string(shipped))), 0o600) //nolint:gosec // G703: the test bed names the folder
}

func (a *Authorizer) path(name string) string { return filepath.Join(a.dir, name) }

// Addr is where the API server expects the authorizer.
func (a *Authorizer) Addr() string { return a.listen.Addr() }

// AuthorizationFile is the path of the API server's AuthorizationConfiguration.
func (a *Authorizer) AuthorizationFile() string { return a.path("authorization.yaml") }

// APIServerArg is the flag with which an API server asks this authorizer.
func (a *Authorizer) APIServerArg() string { return "--authorization-config=" + a.AuthorizationFile() }

// StateFile is the path of the file with the last lists.
func (a *Authorizer) StateFile() string { return a.path("state.json") }

// Process is the one that was started last, nil before the first.
func (a *Authorizer) Process() *testbed.Process { return a.process }

// Start starts the process with a kubeconfig of the cluster. It returns when the process answers.
func (a *Authorizer) Start(ctx context.Context, kubeconfig []byte, args ...string) error {
	if err := os.WriteFile(a.path("kubeconfig"), kubeconfig, 0o600); err != nil {
		return err
	}
	var err error
	a.process, err = testbed.StartProcess(testbed.Command{
		Path: a.binary,
		Args: append([]string{
			"authorizer", "--kubeconfig=" + a.path("kubeconfig"), "--listen=" + a.Addr(), "--health-listen=" + a.health.Addr(),
			"--tls-cert-file=" + a.path("tls.crt"), "--tls-private-key-file=" + a.path("tls.key"),
			"--client-ca-file=" + a.path("ca.crt"), "--state-file=" + a.StateFile(), "--cluster=" + ClusterUID,
		}, args...),
		LogFile: a.path("authorizer.log"),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		_, err := a.get(ctx, "/readyz")
		if err == nil {
			return nil
		}
		select {
		case <-a.process.Done():
			return errors.Join(errors.New("the authorizer has ended"), a.process.Err())
		case <-ctx.Done():
			return fmt.Errorf("the authorizer does not answer: %w\n%s", err, a.process.LogTail())
		case <-time.After(pollInterval):
		}
	}
}

// Metrics returns the metrics in the text format.
func (a *Authorizer) Metrics(ctx context.Context) (string, error) { return a.get(ctx, "/metrics") }

func (a *Authorizer) get(ctx context.Context, path string) (string, error) {
	return get(ctx, "http://"+a.health.Addr()+path)
}

// Pause stops the process without ending it: it accepts connections, and does not answer. Resume
// has it go on.
func (a *Authorizer) Pause() error { return a.process.Signal(syscall.SIGSTOP) }

// Resume has the process go on after Pause.
func (a *Authorizer) Resume() error { return a.process.Signal(syscall.SIGCONT) }

// Kill ends the process as a crash does, and waits. The error is how it ended before, by itself.
func (a *Authorizer) Kill() error {
	if a.process == nil {
		return nil
	}
	return a.process.Kill()
}
