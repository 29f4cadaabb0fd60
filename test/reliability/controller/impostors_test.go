// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
)

// forgeryTimeout is how long an impostor waits for a certificate that it must not get.
const forgeryTimeout = 15 * time.Second

var (
	errAtIt   = errors.New("the victim is at it")
	errUnseen = errors.New("no proof was seen yet")
)

// forgery is one way to get somebody else's certificate.
type forgery struct {
	name string
	try  func(ctx context.Context, c *campaign, victim *machine, n int) error
}

// forgeries are all that is tried, in turn.
var forgeries = []forgery{
	{"a listed machine with another's name, and the bootstrap token", func(ctx context.Context, c *campaign, victim *machine, n int) error {
		return c.pose(ctx, victim, c.attackers[n%2].Provider, nil, nil)
	}},
	{"a listed machine with another's name, and its own certificate", func(ctx context.Context, c *campaign, victim *machine, n int) error {
		own := c.attackers[n%2]
		return c.pose(ctx, victim, own.Provider, own.Certificate, own.Key)
	}},
	{"another TPM with the stolen token", func(ctx context.Context, c *campaign, victim *machine, n int) error {
		return c.pose(ctx, victim, c.strangers[n%2].Provider, nil, nil)
	}},
	{"another TPM with the victim's certificate and key", func(ctx context.Context, c *campaign, victim *machine, n int) error {
		if !victim.busy.TryLock() {
			return errAtIt
		}
		certificate, key := victim.Certificate, victim.Key
		victim.busy.Unlock()
		return c.pose(ctx, victim, c.strangers[n%2].Provider, certificate, key)
	}},
	{"the victim's hello, and a proof with a quote that was seen", func(ctx context.Context, c *campaign, victim *machine, n int) error {
		seen := c.oracle.proof(n)
		if seen == nil {
			return errUnseen
		}
		return c.pose(ctx, victim, &quoter{Challenger: victim.Provider.(provider.Challenger), victim: victim, seen: seen}, nil, nil)
	}},
	{"a proof that was seen, with the bootstrap token", func(ctx context.Context, c *campaign, _ *machine, n int) error {
		return c.replay(ctx, n, nil, nil)
	}},
	{"a proof that was seen, with another node's certificate", func(ctx context.Context, c *campaign, _ *machine, n int) error {
		own := c.attackers[n%2]
		return c.replay(ctx, n, own.Certificate, own.Key)
	}},
}

// quoter has the victim's hello, for a key of the impostor's, and a quote from an earlier proof.
type quoter struct {
	provider.Challenger
	victim *machine
	seen   *certificatesv1.CertificateSigningRequest
}

// Hello returns what the victim's TPM says to everybody.
func (q *quoter) Hello(ctx context.Context, ask provider.Request) (document []byte, remember string, err error) {
	if !q.victim.busy.TryLock() {
		return nil, "", errAtIt
	}
	defer q.victim.busy.Unlock()
	return q.Challenger.Hello(ctx, ask)
}

// Evidence answers the challenge with what was seen.
func (q *quoter) Evidence(_ context.Context, ask provider.Request) ([]byte, error) {
	content, err := attestation.Parse(q.seen.Spec.Request)
	if err != nil {
		return nil, err
	}
	proof, err := attestation.ParseProof(content.Data)
	if err != nil {
		return nil, err
	}
	challenge, err := attestation.ParseChallenge(ask.Challenge.Answer)
	if err != nil {
		return nil, err
	}
	proof.HelloName, proof.HelloUID = ask.Challenge.HelloName, ask.Challenge.HelloUID
	proof.KeyID, proof.Expires = challenge.KeyID, challenge.Expires
	return proof.Marshal()
}

// forge tries one forgery after the other, each on another machine.
func (c *campaign) forge(ctx context.Context) {
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-time.After(c.size.impostors):
		}
		f := forgeries[n%len(forgeries)]
		victim := c.machines[(n*7919)%len(c.machines)]
		limited, cancel := context.WithTimeout(ctx, forgeryTimeout)
		err := f.try(limited, c, victim, n)
		cancel()
		c.mu.Lock()
		c.forged[f.name+": "+outcome(err)]++
		c.mu.Unlock()
	}
}

// outcome is what became of an attempt, in a word.
func outcome(err error) string {
	var refused *fleet.RefusedError
	switch {
	case err == nil:
		return "filed"
	case errors.As(err, &refused):
		return "refused: " + refused.Decision.Reason
	case errors.Is(err, context.DeadlineExceeded):
		return "waits"
	}
	return "not filed"
}

// pose has somebody with another TPM attest as the victim.
func (c *campaign) pose(ctx context.Context, victim *machine, with provider.Provider, certificate, key []byte) error {
	posing := &fleet.Machine{Name: victim.Name, ID: victim.ProviderID(), Provider: with, Certificate: bytes.Clone(certificate), Key: key}
	cluster := c.cluster
	cluster.Wrap = c.oracle.wrap(filing{by: impostor, name: victim.Name})
	_, err := posing.Attest(ctx, cluster)
	if err == nil {
		c.t.Errorf("WRONG DECISION: an impostor got a certificate for %s", victim.Name)
		return fmt.Errorf("it got a certificate for %s", victim.Name)
	}
	return err
}

// replay files a proof that was seen once more. The oracle checks how it is decided.
func (c *campaign) replay(ctx context.Context, n int, certificate, key []byte) error {
	seen := c.oracle.proof(n)
	if seen == nil {
		return errUnseen
	}
	own := &fleet.Machine{Certificate: certificate, Key: key}
	cluster := c.cluster
	cluster.Wrap = c.oracle.wrap(filing{by: impostor})
	api, err := csr.NewClient(own.Credential(cluster))
	if err != nil {
		return err
	}
	object := &certificatesv1.CertificateSigningRequest{TypeMeta: seen.TypeMeta, Spec: certificatesv1.CertificateSigningRequestSpec{
		Request: seen.Spec.Request, SignerName: tpm.SignerName, Usages: seen.Spec.Usages,
	}}
	object.APIVersion, object.Kind, object.Name = certificatesv1.SchemeGroupVersion.String(), "CertificateSigningRequest", csr.NewName()
	if origin := seen.Annotations[attestation.AnnotationOrigin]; origin != "" {
		object.Annotations = map[string]string{attestation.AnnotationOrigin: origin}
	}
	_, err = api.Create(ctx, object, false)
	return err
}

// asToken is the credential of the bootstrap token that all machines share.
func (c *campaign) asToken() *rest.Config {
	cluster := c.cluster
	cluster.Wrap = c.oracle.wrap(filing{by: flooder})
	return (&fleet.Machine{}).Credential(cluster)
}
