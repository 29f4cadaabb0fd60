// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// growthLog files proofs with event logs of several sizes, under a signer that belongs to nobody.
// BenchmarkProofWithEventLog of pkg/verifier/tpm measures how long the verifier takes for them.
func growthLog(ctx context.Context, b *bench) error {
	const filed = 300
	c := newTable("event log", "document", "spec.request", "in etcd", "filed in, median", "read in, median")
	err := b.withControlPlane(ctx, testbed.Options{}, func(cp *testbed.ControlPlane) error {
		api, err := csr.NewClient(cp.AdminConfig()) // a machine may not ask that signer
		if err != nil {
			return err
		}
		key, _, err := csr.NewKey()
		if err != nil {
			return err
		}
		pkcs10, err := csr.PKCS10(csr.Identity{NodeName: "log", ProviderID: "test://log"}, key)
		if err != nil {
			return err
		}
		for _, size := range []int{0, 16 << 10, attestation.MaxEventLog} {
			document, err := proofWithLog(size)
			if err != nil {
				return err
			}
			content, err := attestation.Request{PKCS10: pkcs10, Provider: tpm.Name, Data: document}.Marshal()
			if err != nil {
				return err
			}
			before, err := etcdSize(ctx, cp)
			if err != nil {
				return err
			}
			var filing, reading []time.Duration
			for range b.sized(filed) {
				object := csr.Object(csr.NewName(), nobodysSigner, content, key.Public(), nil)
				began := time.Now()
				if _, err := api.Create(ctx, object, false); err != nil {
					return err
				}
				filing = append(filing, time.Since(began))
				began = time.Now()
				if _, err := api.Get(ctx, object.Name, content); err != nil {
					return err
				}
				reading = append(reading, time.Since(began))
			}
			after, err := etcdSize(ctx, cp)
			if err != nil {
				return err
			}
			c.row(fmt.Sprintf("%d KiB", size>>10), len(document), len(content), int(after-before)/b.sized(filed), quantile(filing, .5), quantile(reading, .5))
		}
		return nil
	})
	if err != nil {
		return err
	}
	c.print()
	return nil
}

// proofWithLog is a proof of the size that a good one has. Nobody judges it.
func proofWithLog(size int) ([]byte, error) {
	p := attestation.Proof{
		Version: attestation.VersionTPM, HelloName: csr.NewName(), HelloUID: "0d7e5e0a-3c1f-4b52-8a51-0e6f6d3f9a01", KeyID: "k1", Expires: time.Now().Unix(),
		PCRBank: "sha256", Quote: make([]byte, 129), Signature: make([]byte, 72),
	}
	for i := range 8 {
		p.PCRs = append(p.PCRs, attestation.PCR{Index: i, Value: make([]byte, 32)})
	}
	if size > 0 {
		p.EventLog = make([]byte, size)
		_, _ = rand.Read(p.EventLog) // never fails
	}
	return p.Marshal()
}

// etcdSize is how many bytes of etcd's database are in use.
func etcdSize(ctx context.Context, cp *testbed.ControlPlane) (size float64, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, cp.EtcdURL()+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, answer.Body.Close()) }()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, err
	}
	const inUse = "etcd_mvcc_db_total_size_in_use_in_bytes"
	if size = parseReadings(string(body)).sum(inUse); size == 0 {
		return 0, fmt.Errorf("etcd does not say %s", inUse)
	}
	return size, nil
}
