// SPDX-License-Identifier: Apache-2.0

package cloudprovider

import (
	"context"
	"errors"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

// machineList is an evidence.MachineSource.
type machineList struct {
	machines []verifier.Machine
	err      error
}

func (l machineList) Machines(context.Context, time.Time) ([]verifier.Machine, error) {
	return l.machines, l.err
}

func machineOf(name, providerID string, eks ...verifier.NamedEK) verifier.Machine {
	return verifier.Machine{Ref: verifier.MachineRef{Name: name}, ProviderID: providerID, EKs: eks}
}

func rules(t *testing.T, providers ...string) *verifier.Rules {
	t.Helper()
	policy := verifier.Policy{
		Cluster: "some-cluster", Token: verifier.Off, Credential: verifier.Recover, BootCounters: verifier.Warn,
		EKSources: []verifier.EKSource{verifier.EKInventory}, NameSources: []verifier.NameSource{verifier.NameInventory},
	}
	for _, name := range providers {
		policy.Providers = append(policy.Providers, verifier.Provider{Name: name})
		policy.Signers = append(policy.Signers, verifier.Signer{Name: "example.com/" + name, Providers: []string{name}})
	}
	r, err := verifier.New(policy)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Which machine an instance is.
func TestMachine(t *testing.T) {
	instance := attestation.Instance{Platform: "acme", ID: "1", Account: "a"}
	named := verifier.NamedEK{Source: verifier.EKInventory, EK: instance.Fingerprint()}
	another := verifier.NamedEK{Source: verifier.EKInventory, EK: attestation.Instance{Platform: "acme", ID: "2"}.Fingerprint()}
	notTrusted := verifier.NamedEK{Source: verifier.EKAnnotation, EK: instance.Fingerprint()}
	down := errors.New("down")
	for name, c := range map[string]struct {
		source machineList
		want   string
		err    error
		reason verifier.Reason
	}{
		"none":                           {source: machineList{}},
		"by provider ID":                 {source: machineList{machines: []verifier.Machine{machineOf("a", ""), machineOf("b", "acme://1"), machineOf("c", "acme://2")}}, want: "b"},
		"by nobody's":                    {source: machineList{machines: []verifier.Machine{machineOf("a", "acme://2")}}},
		"two":                            {source: machineList{machines: []verifier.Machine{machineOf("a", "acme://1"), machineOf("b", "acme://1")}}},
		"named":                          {source: machineList{machines: []verifier.Machine{machineOf("a", "acme://1"), machineOf("b", "", named)}}},
		"named by a source of no policy": {source: machineList{machines: []verifier.Machine{machineOf("a", "", notTrusted), machineOf("b", "acme://1")}}, want: "b"},
		"another is named":               {source: machineList{machines: []verifier.Machine{machineOf("a", "acme://1", another)}}, want: "a"}, // the rules refuse
		"not known":                      {source: machineList{err: down}, err: down},
	} {
		pcrs := []attestation.PCR{{Index: 7}}
		p := Provider{Cloud: "acme", Machines: c.source, Rules: rules(t, "acme"), Judge: WithoutService(func(verifier.Filed) (*cloud.Verified, error) {
			return &cloud.Verified{Instance: instance, HasProviderID: func(id string) bool { return id == "" || id == "acme://1" }, PCRBank: "sha384", PCRs: pcrs}, nil
		})}
		got := p.Verify(t.Context(), evidence.Question{Request: &certificatesv1.CertificateSigningRequest{}, Now: time.Now()})
		if got.Machine != c.want || got.Provider != p.Name() || c.err != nil && !errors.Is(got.Err, c.err) || (got.Err == nil) != (c.err == nil && c.reason == "") {
			t.Errorf("%s: %+v", name, got)
		}
		if c.reason != "" && reasonOf(got.Err) != c.reason {
			t.Errorf("%s: %v", name, got.Err)
		}
		if c.err == nil && (got.EK != instance.Fingerprint() || *got.Instance != instance || got.PCRBank != "sha384" || len(got.PCRs) != 1) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// Neither refused evidence nor evidence that cannot be judged names an instance.
func TestUnverified(t *testing.T) {
	for _, err := range []error{cloud.Refuse(cloud.ReasonSignature, "forged"), errors.New("down")} {
		p := Provider{Cloud: "acme", Machines: machineList{}, Rules: rules(t, "acme"), Judge: WithoutService(func(verifier.Filed) (*cloud.Verified, error) { return nil, err })}
		got := p.Verify(t.Context(), evidence.Question{Request: &certificatesv1.CertificateSigningRequest{}})
		if !errors.Is(got.Err, err) && got.Err.Error() != err.Error() || got.EK != "" || got.Instance != nil || got.Machine != "" {
			t.Errorf("%+v", got)
		}
	}
}

// reasonOf returns the reason of a verdict, "" if an error is none.
func reasonOf(err error) verifier.Reason {
	refusals, ok := errors.AsType[verifier.Refusals](err)
	if !ok {
		return ""
	}
	return refusals.Reason()
}
