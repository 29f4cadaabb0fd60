// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"strings"
	"time"
)

// StartControllerManager starts the controllers for CSRs and bootstrap tokens, each with its own
// service account as in kubeadm. It returns when /healthz answers. The controllers' caches are
// filled a moment later. Requests that were filed before are served, too. extraArgs are added to
// its arguments; of a flag given twice the last one counts.
func (cp *ControlPlane) StartControllerManager(ctx context.Context, extraArgs ...string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	cp.mu.Lock()
	defer cp.mu.Unlock()
	if cp.stopped {
		return errors.New("start the controller manager: the control plane is stopped")
	}
	if cp.controllerManager != nil {
		return errors.New("start the controller manager: it is started already")
	}

	now := time.Now()
	pair, err := cp.clientCA.IssueClient("system:kube-controller-manager", nil, now.Add(-time.Hour), now.Add(adminValidity))
	if err != nil {
		return err
	}
	const kubeconfig = "kube-controller-manager.kubeconfig"
	if err := cp.WriteKubeconfig(cp.path(kubeconfig), CertificateUser(pair)); err != nil {
		return err
	}
	addr, port, err := cp.takePort()
	if err != nil {
		return err
	}
	args := []string{
		"--kubeconfig=" + cp.path(kubeconfig),
		"--controllers=" + strings.Join([]string{
			"certificatesigningrequest-approving-controller",
			"certificatesigningrequest-signing-controller",
			"certificatesigningrequest-cleaner-controller",
			"bootstrap-signer-controller",
			"token-cleaner-controller",
		}, ","),
		"--use-service-account-credentials=true",
		"--leader-elect=false",
		"--bind-address=127.0.0.1",
		"--secure-port=" + port,
		"--tls-cert-file=" + cp.path("serving.crt"),
		"--tls-private-key-file=" + cp.path("serving.key"),
		"--cluster-signing-cert-file=" + cp.path("client-ca.crt"),
		"--cluster-signing-key-file=" + cp.path("client-ca.key"),
		"--cluster-signing-duration=" + cp.signingDuration.String(),
	}
	process, err := StartProcess(Command{
		Path:    cp.components.ControllerManager,
		Args:    append(args, extraArgs...),
		LogFile: cp.path("kube-controller-manager.log"),
	})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, process.Kill())
		}
	}()
	roots := x509.NewCertPool()
	roots.AddCert(cp.serverCA.Certificate())
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}
	defer transport.CloseIdleConnections()
	err = pollWhile(ctx, process, "the controller manager", func(ctx context.Context) error {
		return getOK(ctx, &http.Client{Transport: transport}, "https://"+addr+"/healthz")
	})
	if err != nil {
		return err
	}
	cp.controllerManager = process
	return nil
}

// StopControllerManager stops it; StartControllerManager may follow. Nothing
// happens if it does not run.
func (cp *ControlPlane) StopControllerManager() error {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	if cp.controllerManager == nil {
		return nil
	}
	process := cp.controllerManager
	cp.controllerManager = nil
	return process.Stop(defaultGrace)
}
