// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	csrutil "k8s.io/client-go/util/certificate/csr"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// withManager runs a function with kube-controller-manager's approver and signer. Like the
// controller's, their clients have no rate limit. Our policies are removed, since they allow only
// the controller to approve kubelets' client certificates. Both are as before when it returns.
func withManager(ctx context.Context, cp *testbed.ControlPlane, use func() error) (err error) {
	if err := kubectlPolicies(ctx, cp, "delete", "--wait=true"); err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, kubectlPolicies(ctx, cp, "apply", "--server-side"))
		if err == nil {
			err = controllerprocess.AwaitPolicies(ctx, cp)
		}
	}()
	if err := awaitNoPolicies(ctx, cp); err != nil {
		return err
	}
	if err := cp.StartControllerManager(ctx,
		"--controllers=certificatesigningrequest-approving-controller,certificatesigningrequest-signing-controller",
		"--kube-api-qps=100000", "--kube-api-burst=100000"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cp.StopControllerManager()) }()
	return use()
}

// kubectlPolicies deletes or applies what is in the manifest.
func kubectlPolicies(ctx context.Context, cp *testbed.ControlPlane, args ...string) error {
	admin := filepath.Join(cp.Dir(), "policies.kubeconfig")
	if err := cp.WriteKubeconfig(admin, cp.AdminUser()); err != nil {
		return err
	}
	_, err := cp.RunKubectl(ctx, admin, append(args, "--filename="+filepath.Join(module, "packaging", "kubernetes", "policies.yaml"))...)
	return err
}

// awaitNoPolicies waits until the API server's admission knows that the policies are gone: somebody
// else than the controller may approve.
func awaitNoPolicies(ctx context.Context, cp *testbed.ControlPlane) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	requests := cp.Client().CertificatesV1().CertificateSigningRequests()
	key, _, err := csr.NewKey()
	if err != nil {
		return err
	}
	n := &node{name: "probe", key: key.(*ecdsa.PrivateKey)}
	content, err := n.request()
	if err != nil {
		return err
	}
	filed, err := requests.Create(ctx, csr.Object(csr.NewName(), certificatesv1.KubeAPIServerClientKubeletSignerName, content, key.Public(), nil), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	approved := filed.DeepCopy()
	approved.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Probe",
	}}
	for {
		_, err := requests.UpdateApproval(ctx, filed.Name, approved, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil {
			return requests.Delete(ctx, filed.Name, metav1.DeleteOptions{})
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until the policies are gone: %w", err)
		case <-time.After(pollInterval):
		}
	}
}

// node is one that gets certificates as a kubelet does: from client-go's RequestCertificate and
// WaitForCertificate.
type node struct {
	name string
	key  *ecdsa.PrivateKey
	// certificate and keyPEM are the latest that it got.
	certificate, keyPEM []byte
	took                time.Duration
	began               time.Time
}

func (n *node) request() ([]byte, error) {
	der, err := x509.CreateCertificateRequest(nil, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "system:node:" + n.name, Organization: []string{"system:nodes"}},
	}, n.key)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), err
}

// enrol gets a certificate with the bootstrap token, or with the certificate that the node has,
// over a connection of its own.
func (n *node) enrol(ctx context.Context, cp *testbed.ControlPlane, token string) error {
	config := &rest.Config{Host: cp.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: cp.ServerCA()}, QPS: -1}
	if n.certificate == nil {
		config.BearerToken = token
	} else {
		config.CertData, config.KeyData = n.certificate, n.keyPEM
	}
	// client-go shares transports between clients of the same credential, unless they choose
	// proxies and dial their own way.
	config.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
	config.Dial = (&net.Dialer{}).DialContext
	transport, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	defer transport.CloseIdleConnections()
	client, err := kubernetes.NewForConfigAndClient(config, transport)
	if err != nil {
		return err
	}
	n.began = time.Now()
	key, keyPEM, err := csr.NewKey()
	if err != nil {
		return err
	}
	n.key = key.(*ecdsa.PrivateKey)
	content, err := n.request()
	if err != nil {
		return err
	}
	name, uid, err := csrutil.RequestCertificateWithContext(ctx, client, content, "", certificatesv1.KubeAPIServerClientKubeletSignerName, nil, csr.Usages(key.Public()), key)
	if err != nil {
		return fmt.Errorf("%s: %w", n.name, err)
	}
	certificate, err := csrutil.WaitForCertificate(ctx, client, name, uid)
	if err != nil {
		return fmt.Errorf("%s: %w", n.name, err)
	}
	n.took = time.Since(n.began)
	n.certificate, n.keyPEM = certificate, keyPEM
	return nil
}

// enrolNodes has all nodes get a certificate at once, and returns how long that took from when the
// first set out.
func enrolNodes(ctx context.Context, cp *testbed.ControlPlane, token string, nodes []*node) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, enrolTimeLimit)
	defer cancel()
	failed := make([]error, len(nodes))
	start := make(chan struct{})
	var wait sync.WaitGroup
	for i, n := range nodes {
		wait.Go(func() {
			<-start
			failed[i] = n.enrol(ctx, cp, token)
		})
	}
	close(start)
	wait.Wait()
	if err := errors.Join(failed...); err != nil {
		return 0, err
	}
	first, last := nodes[0].began, nodes[0].began
	for _, n := range nodes {
		if n.began.Before(first) {
			first = n.began
		}
		if end := n.began.Add(n.took); end.After(last) {
			last = end
		}
	}
	return last.Sub(first), nil
}

func newNodes(prefix string, count int) []*node {
	nodes := make([]*node, count)
	for i := range nodes {
		nodes[i] = &node{name: fmt.Sprintf("%s-%04d", prefix, i)}
	}
	return nodes
}
