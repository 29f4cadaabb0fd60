// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	csrutil "k8s.io/client-go/util/certificate/csr"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// enrolmentLimit is for one first certificate; it takes less than a second.
const enrolmentLimit = 2 * time.Minute

// enrolment compares a machine's first certificate with and without the plugin. With it, the time
// is from the start of the plugin until it has printed the credential. Without it, a kubelet calls
// client-go's RequestCertificate and WaitForCertificate in its own process, and
// kube-controller-manager approves and signs. They alternate on one API server.
func (b *bench) enrolment(ctx context.Context) error {
	return b.withCluster(ctx, "enrolment", b.enrolments+warmUps, func(c *cluster) error {
		var ours, theirs []time.Duration
		parts := map[string][]time.Duration{}
		for i, m := range c.machines {
			var plugin, kubelet time.Duration
			var split map[string]time.Duration
			sides := []func() (err error){
				func() (err error) { plugin, split, err = m.enrol(ctx, b.plugin, c); return err },
				func() (err error) { kubelet, err = c.enrolAsKubelet(ctx, "kubelet-"+m.name); return err },
			}
			first := i % 2
			if err := errors.Join(sides[first](), sides[1-first]()); err != nil {
				return err
			}
			if i < warmUps {
				continue
			}
			ours, theirs = append(ours, plugin), append(theirs, kubelet)
			for part, took := range split {
				parts[part] = append(parts[part], took)
			}
		}
		b.table.add(compared("first certificate, attested", ours, "client-go and kube-controller-manager", theirs))
		for _, part := range enrolmentParts {
			b.table.add(compared("first certificate: "+part, parts[part], "all of it", ours))
		}
		return nil
	})
}

// The parts of a first certificate, in their order.
const (
	partStart     = "both processes start"
	partKey       = "lock, key, hello by the TPM"
	partHello     = "hello round, API server and controller"
	partProof     = "proof by the TPM"
	partSecond    = "proof round, API server and controller"
	partDisk      = "what is written down on the way"
	partInstall   = "check and install"
	partHandOver  = "the run sees it and prints"
	partUnsettled = ""
)

var enrolmentParts = []string{partStart, partKey, partHello, partProof, partSecond, partDisk, partInstall, partHandOver}

// partOf says which part a worker's step belongs to. proven is set once the TPM has made its proof.
func partOf(step enrol.Step, proven bool) string {
	switch step {
	case enrol.StepLock, enrol.StepTidy, enrol.StepPrepare:
		return partKey
	case enrol.StepSave, enrol.StepSaveUID:
		return partDisk
	case enrol.StepProve:
		return partProof
	case enrol.StepFile, enrol.StepChallenge, enrol.StepWait:
		if proven {
			return partSecond
		}
		return partHello
	case enrol.StepCheck, enrol.StepInstall:
		return partInstall
	}
	return partUnsettled // after the certificate is there
}

// enrol runs the plugin where there is no certificate, and returns how long that took and where the
// time went.
func (m *machine) enrol(ctx context.Context, plugin string, c *cluster) (time.Duration, map[string]time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, enrolmentLimit)
	defer cancel()
	ask, err := execInfo(c.origin())
	if err != nil {
		return 0, nil, err
	}
	cmd := exec.CommandContext(ctx, plugin, m.flags...) //nolint:gosec // G204: built above
	cmd.Env = append(os.Environ(), ask)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	err = cmd.Run()
	took := time.Since(began)
	if err != nil {
		return 0, nil, fmt.Errorf("%s: %w: %s", m.name, err, stderr.String())
	}
	pair, err := m.certs.Current()
	if err != nil {
		return 0, nil, fmt.Errorf("%s: %w", m.name, err)
	}
	if pair.NodeName() != m.name || !bytes.Contains(stdout.Bytes(), []byte("-----BEGIN CERTIFICATE-----")) {
		return 0, nil, fmt.Errorf("%s: no credential was printed, or node %s's", m.name, pair.NodeName())
	}
	result, err := m.result(ctx)
	if err != nil {
		return 0, nil, fmt.Errorf("%s: %w", m.name, err)
	}
	return took, divide(result, began, took), nil
}

// result waits for the worker, which ends a moment after the run, and returns what it wrote down.
func (m *machine) result(ctx context.Context) (*cache.Result, error) {
	for {
		if !m.certs.Worker().Alive() {
			state, err := m.certs.State()
			if err != nil {
				return nil, err
			}
			if state.Last == nil || state.Last.Reason != "" {
				return nil, fmt.Errorf("the worker has not succeeded: %+v", state.Last)
			}
			return state.Last, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the worker: %w", ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// divide says where the time of a run went, by what its worker wrote down. What is left is before
// the worker's first step, or after its certificate was there.
func divide(result *cache.Result, began time.Time, took time.Duration) map[string]time.Duration {
	parts := map[string]time.Duration{partStart: result.Started.Sub(began)}
	left := took - parts[partStart]
	proven := false
	for _, phase := range result.Phases {
		step, spent := enrol.Step(phase.Name), time.Duration(phase.Milliseconds*float64(time.Millisecond))
		proven = proven || step == enrol.StepProve
		if part := partOf(step, proven); part != partUnsettled {
			parts[part] += spent
			left -= spent
		}
	}
	parts[partHandOver] = left
	return parts
}

// enrolAsKubelet does what a kubelet does for its first certificate, with a new connection as it
// has one.
func (c *cluster) enrolAsKubelet(ctx context.Context, name string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, enrolmentLimit)
	defer cancel()
	began := time.Now()
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: c.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: c.ServerCA()}, BearerToken: c.token, UserAgent: name,
	})
	if err != nil {
		return 0, err
	}
	key, _, err := csr.NewKey()
	if err != nil {
		return 0, err
	}
	der, err := csr.PKCS10(csr.Identity{NodeName: name}, key)
	if err != nil {
		return 0, err
	}
	request := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	requested, uid, err := csrutil.RequestCertificateWithContext(ctx, client, request, "", certificatesv1.KubeAPIServerClientKubeletSignerName, nil, csr.Usages(key.Public()), key)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	certificate, err := csrutil.WaitForCertificate(ctx, client, requested, uid)
	took := time.Since(began)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	_, leaf, err := csr.ParseCertificates(certificate)
	if err != nil || leaf.Subject.CommonName != "system:node:"+name {
		return 0, fmt.Errorf("%s: another's certificate, or none: %w", name, err)
	}
	return took, nil
}
