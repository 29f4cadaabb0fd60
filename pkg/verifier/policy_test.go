// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

func TestNewRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		bend func(*Policy)
		want string
	}{
		"nothing":                            {func(p *Policy) { *p = Policy{} }, "cluster"},
		"no cluster":                         {func(p *Policy) { p.Cluster = "" }, "cluster"},
		"a provider that is no label":        {func(p *Policy) { p.Providers[0].Name = "TPM" }, "providers"},
		"a provider twice":                   {func(p *Policy) { p.Providers = append(p.Providers, p.Providers[0]) }, "providers"},
		"insecure as evidence":               {func(p *Policy) { p.Providers[1].Name = InsecureProvider }, "providers"},
		"no signer":                          {func(p *Policy) { p.Signers = nil }, "signers"},
		"a signer without a domain":          {func(p *Policy) { p.Signers[0].Name = "tpm" }, "signers"},
		"a signer of one segment":            {func(p *Policy) { p.Signers[0].Name = "cluster-x-k8s-io/tpm" }, "signers"},
		"a signer without a path":            {func(p *Policy) { p.Signers[0].Name = "example.com/" }, "signers"},
		"a signer too long":                  {func(p *Policy) { p.Signers[0].Name = "example.com/" + strings.Repeat("x", 571) }, "signers"},
		"a signer twice":                     {func(p *Policy) { p.Signers[1] = p.Signers[0] }, "signers"},
		"the signer of hellos":               {func(p *Policy) { p.Signers[0].Name = attestation.HelloSignerName }, "signers"},
		"the signer of hellos, unused":       {func(p *Policy) { p.Providers[0].Challenges, p.Signers[0].Name = false, attestation.HelloSignerName }, "signers"},
		"the insecure signer listed":         {func(p *Policy) { p.Signers[0].Name = InsecureSignerName }, "signers"},
		"Kubernetes' signer alone":           {func(p *Policy) { p.Signers[2].Shared = false }, "signers"},
		"a signer without a provider":        {func(p *Policy) { p.Signers[0].Providers = nil }, "signers"},
		"a signer with two providers":        {func(p *Policy) { p.Signers[0].Providers = []string{"tpm", "acme"} }, "signers"},
		"an unknown provider":                {func(p *Policy) { p.Signers[0].Providers = []string{"null"} }, "signers"},
		"insecure under another":             {func(p *Policy) { p.Signers[0].Providers = []string{InsecureProvider} }, "signers"},
		"insecure by another name":           {func(p *Policy) { p.InsecureSigner = "true" }, "insecureSigner"},
		"a node as bootstrapper":             {func(p *Policy) { p.Bootstrappers[0].Username = userNode + "x" }, "bootstrappers"},
		"a token as bootstrapper":            {func(p *Policy) { p.Bootstrappers[0].Username = "system:bootstrap:abc123" }, "bootstrappers"},
		"anybody as bootstrapper":            {func(p *Policy) { p.Bootstrappers[0].Username = "system:anonymous" }, "bootstrappers"},
		"no bootstrapper":                    {func(p *Policy) { p.Bootstrappers[0].Username = "" }, "bootstrappers"},
		"a bootstrapper without group":       {func(p *Policy) { p.Bootstrappers[0].Group = "" }, "bootstrappers"},
		"administrators":                     {func(p *Policy) { p.Bootstrappers[0].Group = groupMasters }, "bootstrappers"},
		"tokens of nodes":                    {func(p *Policy) { p.TokenGroup = groupNodes }, "tokenGroup"},
		"a node that has no name":            {func(p *Policy) { p.UnattestedNodes = []string{""} }, "unattestedNodes"},
		"a node in capitals":                 {func(p *Policy) { p.UnattestedNodes = []string{"Node"} }, "unattestedNodes"},
		"a node twice":                       {func(p *Policy) { p.UnattestedNodes = []string{"a", "b", "a"} }, "unattestedNodes"},
		"serving without what is forbidden":  {func(p *Policy) { p.ForbiddenAddresses = nil }, "forbiddenAddresses"},
		"a forbidden wildcard":               {func(p *Policy) { p.ForbiddenAddresses = []string{"*.example.com"} }, "forbiddenAddresses"},
		"a forbidden range of odd bits":      {func(p *Policy) { p.ForbiddenAddresses = []string{"10.0.0.0/33"} }, "forbiddenAddresses"},
		"a signer for both":                  {func(p *Policy) { p.ServingSigners = []string{tpmSigner} }, "servingSigners"},
		"Kubernetes' signer of clients":      {func(p *Policy) { p.ServingSigners = []string{"kubernetes.io/kube-apiserver-client"} }, "servingSigners"},
		"a signed signer that is not served": {func(p *Policy) { p.SignedServingSigners = []string{"example.com/serving"} }, "signedServingSigners"},
		"a signed signer of clients":         {func(p *Policy) { p.SignedServingSigners = []string{tpmSigner} }, "signedServingSigners"},
		"a signed signer twice":              {func(p *Policy) { p.SignedServingSigners = []string{oursToServe, oursToServe} }, "signedServingSigners"},
		"Kubernetes' signer signed":          {func(p *Policy) { p.SignedServingSigners = []string{servingSigner} }, "signedServingSigners"},
		"a serving signer twice":             {func(p *Policy) { p.ServingSigners = append(p.ServingSigners, p.ServingSigners[0]) }, "servingSigners"},
		"a serving signer without a domain":  {func(p *Policy) { p.ServingSigners = []string{"x"} }, "servingSigners"},
		"no source of EKs":                   {func(p *Policy) { p.EKSources = nil }, "ekSources"},
		"an unknown source of EKs":           {func(p *Policy) { p.EKSources = []EKSource{"Node"} }, "ekSources"},
		"a source of EKs twice":              {func(p *Policy) { p.EKSources = []EKSource{EKInventory, EKInventory} }, "ekSources"},
		"trust without a token":              {func(p *Policy) { p.TrustOnFirstUse, p.Token = true, Warn }, "trustOnFirstUse"},
		"trust without any token rule":       {func(p *Policy) { p.TrustOnFirstUse, p.Token = true, Off }, "trustOnFirstUse"},
		"trust in nothing": {func(p *Policy) {
			p.TrustOnFirstUse, p.Providers, p.Signers, p.InsecureSigner = true, nil, nil, InsecureSignerName
		}, "trustOnFirstUse"},
		"no source of names":         {func(p *Policy) { p.NameSources = nil }, "nameSources"},
		"an unknown source of names": {func(p *Policy) { p.NameSources = []NameSource{"Node"} }, "nameSources"},
		"a source of names twice":    {func(p *Policy) { p.NameSources = []NameSource{NameMachine, NameMachine} }, "nameSources"},
		"no mode for tokens":         {func(p *Policy) { p.Token = 0 }, "token"},
		"no mode for credentials":    {func(p *Policy) { p.Credential = 0 }, "credential"},
		"no mode for boot counters":  {func(p *Policy) { p.BootCounters = 0 }, "bootCounters"},
		"a mode that is none":        {func(p *Policy) { p.BootCounters = Off + 1 }, "bootCounters"},
		"a negative mode":            {func(p *Policy) { p.Token = -1 }, "token"},
		"too short a deadline":       {func(p *Policy) { p.WaitDeadline = time.Second }, "waitDeadline"},
		"too long a deadline":        {func(p *Policy) { p.WaitDeadline = 24 * time.Hour }, "waitDeadline"},
		"a negative deadline":        {func(p *Policy) { p.WaitDeadline = -time.Hour }, "waitDeadline"},
	} {
		t.Run(name, func(t *testing.T) {
			p := goodPolicy()
			c.bend(&p)
			if rules, err := New(p); rules != nil || err == nil || !strings.HasPrefix(err.Error(), c.want+":") {
				t.Errorf("%v, %v, want an error of %s", rules, err, c.want)
			}
		})
	}
}

func TestNewTakes(t *testing.T) {
	for name, bend := range map[string]func(*Policy){
		"the good one": func(*Policy) {},
		"the insecure signer alone": func(p *Policy) {
			p.Providers, p.Signers, p.EKSources, p.InsecureSigner = nil, nil, nil, InsecureSignerName
		},
		"trust instead of a source of EKs":      func(p *Policy) { p.TrustOnFirstUse, p.EKSources = true, nil },
		"no source of EKs, and no challenge":    func(p *Policy) { p.EKSources, p.Providers[0].Challenges = nil, false },
		"trust beside a source of EKs":          func(p *Policy) { p.TrustOnFirstUse = true },
		"the longest name":                      func(p *Policy) { p.Signers[0].Name = "example.com/" + strings.Repeat("x", 559) },
		"serving, signed by others alone":       func(p *Policy) { p.SignedServingSigners = nil },
		"the shortest deadline":                 func(p *Policy) { p.WaitDeadline = time.Minute },
		"the longest deadline":                  func(p *Policy) { p.WaitDeadline = 23 * time.Hour },
		"a shared signer for several providers": func(p *Policy) { p.Signers[2].Providers = []string{"acme", "tpm"} },
		"no bootstrappers, another deadline":    func(p *Policy) { p.Bootstrappers, p.WaitDeadline = nil, time.Hour },
	} {
		p := goodPolicy()
		bend(&p)
		if rules, err := New(p); rules == nil || err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A policy that is changed after New changes nothing.
func TestPolicyIsCopied(t *testing.T) {
	w := good(First)
	rules := must(New(w.policy))
	w.policy.Signers[0].Providers[0] = "x"
	w.policy.Providers[0] = Provider{}
	w.policy.ServingSigners[1], w.policy.SignedServingSigners[0] = "", ""
	w.policy.EKSources[0], w.policy.NameSources[0], w.policy.NameSources[1] = "", "", ""
	if d := rules.Judge(w.in); d.Outcome != Approve || !rules.SignsServing(oursToServe) {
		t.Errorf("%s: %v", d.Outcome, d.Refusals)
	}
}

func TestReasonsAreSentences(t *testing.T) {
	for reason, meaning := range Reasons() {
		if reason == "" || meaning == "" || strings.HasSuffix(meaning, ".") || strings.ContainsAny(meaning, "|\n") {
			t.Errorf("%s: %q", reason, meaning)
		}
		if strings.ContainsFunc(string(reason), func(r rune) bool { return (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') }) || reason[0] > 'Z' {
			t.Errorf("%s is not CamelCase", reason)
		}
	}
}
