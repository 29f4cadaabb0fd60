// SPDX-License-Identifier: Apache-2.0

// Package cloud tests the providers of clouds from boot to Ready: real kubelets, the shipped plugin
// and the shipped controller. What they ask of a cloud is imitated: the metadata service listens at
// its real address in a network namespace of the suite, and the controller reaches the services at
// their real names through a proxy.
package cloud

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const module = "../.."

var built controllerprocess.KubeletPrograms

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard()) // what a client has to say, such as that a kind is deprecated
	os.Exit(controllerprocess.MainWithKubelets(inCluster{m}, module, &built, "kubectl-attest"))
}

// inCluster runs the tests in a cluster that they share.
type inCluster struct{ *testing.M }

func (m inCluster) Run() int { return testbed.Main(withController(m), setUp) }

// withController runs the tests, and then ends the controller.
type withController struct{ *testing.M }

func (m withController) Run() int {
	code := m.M.Run()
	if code != 0 {
		fmt.Fprintln(os.Stderr, shared.controller.LogTail())
	}
	if err := shared.controller.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// internet is what the controller reaches by name: services over TLS, through a proxy.
type internet struct {
	ca    *testbed.CA
	hosts map[string]string // address of each host
	proxy string
}

// newInternet starts the proxy. It knows no host yet.
func newInternet() (*internet, error) {
	ca, err := testbed.NewCA("imitated services")
	if err != nil {
		return nil, err
	}
	i := &internet{ca: ca, hosts: map[string]string{}}
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go func() { _ = (&http.Server{Handler: i, ReadHeaderTimeout: time.Second}).Serve(listener) }()
	i.proxy = "http://" + listener.Addr().String()
	return i, nil
}

// host lets a handler serve a host over TLS.
func (i *internet) host(name string, handler http.Handler) error {
	pair, err := i.ca.IssueServer([]string{name}, nil)
	if err != nil {
		return err
	}
	certificate, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
	if err != nil {
		return err
	}
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12})
	if err != nil {
		return err
	}
	i.hosts[name+":443"] = listener.Addr().String()
	server := &http.Server{Handler: handler, ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Second}
	go func() { _ = server.Serve(listener) }()
	return nil
}

// ServeHTTP connects a client to a host (RFC 9110, section 9.3.6).
func (i *internet) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	address, known := i.hosts[r.Host]
	if r.Method != http.MethodConnect || !known {
		http.Error(w, "there is no such host", http.StatusBadGateway)
		return
	}
	to, err := net.Dial("tcp", address)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer func() { _ = to.Close() }()
	w.WriteHeader(http.StatusOK)
	from, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = from.Close() }()
	go func() { _, _ = io.Copy(to, from) }()
	_, _ = io.Copy(from, to)
}

// env has the controller use the proxy, and trust the CA.
func (i *internet) env(dir string) ([]string, error) {
	file := filepath.Join(dir, "imitated-services.pem")
	return []string{"HTTPS_PROXY=" + i.proxy, "SSL_CERT_FILE=" + file}, os.WriteFile(file, i.ca.CertPEM(), 0o600)
}

// metadataServices has the metadata service of each cloud, by the beginning of its paths. A real
// machine has one. Their paths differ, so all machines of the suite share the address.
type metadataServices map[string]http.Handler

func (s metadataServices) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for prefix, service := range s {
		if strings.HasPrefix(r.URL.Path, prefix) {
			service.ServeHTTP(w, r)
			return
		}
	}
	http.NotFound(w, r)
}

// listen serves at the real address, which only this network namespace has.
func (s metadataServices) listen(ctx context.Context) error {
	host, _, err := net.SplitHostPort(metadata.Address)
	if err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "ip", "address", "add", host+"/32", "dev", "lo").CombinedOutput(); err != nil {
		return errors.Join(err, errors.New(string(out)))
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", metadata.Address)
	if err != nil {
		return err
	}
	go func() { _ = (&http.Server{Handler: s, ReadHeaderTimeout: time.Second}).Serve(listener) }()
	return nil
}
