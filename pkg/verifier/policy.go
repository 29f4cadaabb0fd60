// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// Mode says whether a failed rule refuses a request. The zero value is an error in a Policy.
type Mode int

// The modes.
const (
	// Required: a request that fails the rule is refused.
	Required Mode = iota + 1
	// Warn: a failure is only reported.
	Warn
	// Off: the rule is not applied.
	Off
	// Recover is only for Policy.Credential. It is like Required, but recreates a lost record.
	Recover
)

// The always-allow signer, for platforms without a secure mechanism, and its provider.
const (
	InsecureSignerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-insecure"
	InsecureProvider   = "insecure"
)

// Limits of the rules.
const (
	// DefaultWaitDeadline is the default age at which a waiting request is denied.
	DefaultWaitDeadline = 20 * time.Minute
	minWaitDeadline     = time.Minute
	// maxWaitDeadline: kube-controller-manager deletes pending requests after 24 h.
	maxWaitDeadline = 23 * time.Hour
	// deletingRenewal is the time after the begin of its deletion in which a machine may renew. It
	// also bounds the lifetime of such a certificate.
	deletingRenewal = time.Hour
)

// EKSource is an authority that names the endorsement keys (EKs) of machines. No node may be able
// to write it.
type EKSource string

// The sources of EKs.
const (
	EKInventory  EKSource = "Inventory"
	EKPlatform   EKSource = "Platform"
	EKAnnotation EKSource = "Annotation"
)

// NameSource is a source of a machine's node name. Beware of addresses: some platforms report
// addresses that the guest claims.
type NameSource string

// The sources of node names.
const (
	NameInventory   NameSource = "Inventory"
	NameMachine     NameSource = "MachineName"
	NameHostname    NameSource = "Hostname"
	NameInternalDNS NameSource = "InternalDNS"
	NameExternalDNS NameSource = "ExternalDNS"
)

// Provider is a kind of evidence.
type Provider struct {
	// Name is the provider's name in the PROVIDER block.
	Name string
	// Challenges says that each proof follows a hello.
	Challenges bool
}

// Signer is a signer of the policy.
type Signer struct {
	Name string
	// Providers are the providers whose evidence the signer accepts: one, unless the signer is
	// shared.
	Providers []string
	// Shared says that others use the signer, too. The rules ignore requests without evidence of
	// Providers.
	Shared bool
}

// Bootstrapper is an identity that may ask for a node's first certificate, beside bootstrap tokens.
type Bootstrapper struct {
	// Username is the user's exact name.
	Username string
	// Group is a group that the user must have.
	Group string
}

// Policy has the operator's decisions. Nothing in it comes from a node. A field without a
// documented default must be set.
type Policy struct {
	// Cluster is the name of the cluster in records.
	Cluster string
	// Providers are the providers of the signers, the strongest first. A machine that was attested
	// by one must later be attested by the same or a stronger one.
	Providers []Provider
	// Signers are the signers for whose requests the rules decide. Those of hellos and rehearsals
	// must not be listed: they are always included.
	Signers []Signer
	// SharedHello says that other controllers answer hellos, too. The rules then ignore hellos of
	// other providers. Default: these are denied.
	SharedHello bool
	// InsecureSigner switches the always-allow signer on, by its name, InsecureSignerName. Default:
	// off.
	InsecureSigner string
	// Bootstrappers may ask for first certificates, beside bootstrap tokens. Default: none.
	Bootstrappers []Bootstrapper
	// TokenGroup is the group that the user of a bootstrap token must have. Default:
	// system:bootstrappers, which every token has.
	TokenGroup string
	// Token is the mode of the rule that a bootstrap token must have been made for the machine.
	// With the insecure signer it is always Required. The rule does not apply to Bootstrappers,
	// which have no token.
	Token Mode
	// Credential is the mode of the rule that a renewal must be requested with a certificate in the
	// record. Recover also accepts another certificate of the node if a source names the
	// endorsement key and the record was lost. A record is lost if it is missing, or if all its
	// certificates have expired.
	Credential Mode
	// BootCounters is the mode of the rule that a TPM's boot counters must not go back.
	BootCounters Mode
	// EKSources are the accepted sources of EKs and of instances, beside the record. At least one
	// is needed if a provider challenges and there is no TrustOnFirstUse: the evidence of others
	// may name a machine.
	EKSources []EKSource
	// EKNotNamed is the mode of the rule that the source which vouched for a machine's endorsement
	// key must still name it: Required or Warn. If none vouched for it, as in trust on first use,
	// the rule applies to each source that names other keys. It applies once the controller has
	// accepted the change (Record.EKReplacedBy). Default: Warn for EKPlatform, Required for other
	// sources.
	EKNotNamed Mode
	// TrustOnFirstUse lets the provider ID in a request select a machine for an EK that no
	// authority names. The machine must be at most 2 h old, and must have no record and no nodeRef
	// of its own. The first requester with its bootstrap token becomes the machine. Token must be
	// Required. Default: off.
	TrustOnFirstUse bool
	// NameSources are the sources of node names. The first source with a name for a machine
	// decides.
	NameSources []NameSource
	// ServingSigners are the signers whose requests for serving certificates the controller
	// approves. Default: none.
	ServingSigners []string
	// SignedServingSigners are the ServingSigners for which the controller also signs. Nobody else
	// may sign for them. Default: none, others sign for all.
	SignedServingSigners []string
	// ForbiddenAddresses are DNS names, IPs and CIDRs that no serving certificate may have: the API
	// server's, and the service range. Required with ServingSigners.
	ForbiddenAddresses []string
	// UnattestedNodes are names of nodes without evidence. Such a node renews through
	// kubernetes.io/kube-apiserver-client-kubelet, with its own certificate and for its own name,
	// until it has a record. Default: none.
	UnattestedNodes []string
	// WaitDeadline is the age at which a waiting request is denied. Default: DefaultWaitDeadline.
	WaitDeadline time.Duration
}

// Rules decide on requests by one policy. Only SetUnattestedNodes changes them after New. They are
// safe for concurrent use. The zero value has no signer, so it ignores every request.
type Rules struct {
	policy Policy
	// unattested replaces policy.UnattestedNodes. It is nil in the zero value.
	unattested atomic.Pointer[[]string]
	signers    map[string]Signer
	forbidden  forbiddenAddresses
}

// New returns the rules of a policy, which it copies. An error names the field at fault.
func New(p Policy) (*Rules, error) {
	p.Providers, p.Signers = slices.Clone(p.Providers), slices.Clone(p.Signers)
	p.Bootstrappers = slices.Clone(p.Bootstrappers)
	p.ServingSigners, p.SignedServingSigners = slices.Clone(p.ServingSigners), slices.Clone(p.SignedServingSigners)
	p.ForbiddenAddresses = slices.Clone(p.ForbiddenAddresses)
	p.EKSources, p.NameSources = slices.Clone(p.EKSources), slices.Clone(p.NameSources)
	if p.TokenGroup == "" {
		p.TokenGroup = groupBootstrappers
	}
	if p.WaitDeadline == 0 {
		p.WaitDeadline = DefaultWaitDeadline
	}
	r := &Rules{policy: p, signers: map[string]Signer{}}
	if err := r.SetUnattestedNodes(p.UnattestedNodes); err != nil {
		return nil, err
	}
	for _, step := range []func() error{r.checkProviders, r.checkSigners, r.checkRequesters, r.checkServing, r.checkSources, r.checkModes} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func (r *Rules) checkProviders() error {
	if r.policy.Cluster == "" {
		return errors.New("cluster: must be set")
	}
	seen := map[string]bool{InsecureProvider: true} // InsecureSigner switches it on
	for _, p := range r.policy.Providers {
		if err := attestation.CheckProviderName(p.Name); err != nil {
			return fmt.Errorf("providers: %w", err)
		}
		if seen[p.Name] {
			return fmt.Errorf("providers: %q must be listed once, and must be evidence", p.Name)
		}
		seen[p.Name] = true
	}
	return nil
}

func (r *Rules) checkSigners() error {
	var challenging []string
	for _, p := range r.policy.Providers {
		if p.Challenges {
			challenging = append(challenging, p.Name)
		}
	}
	if len(challenging) > 0 {
		for _, name := range []string{attestation.HelloSignerName, attestation.RehearsalHelloSignerName, attestation.RehearsalSignerName} {
			r.signers[name] = Signer{Name: name, Providers: challenging, Shared: r.policy.SharedHello}
		}
	}
	for _, s := range r.policy.Signers {
		domain, path, _ := strings.Cut(s.Name, "/")
		switch _, twice := r.signers[s.Name]; {
		case !strings.Contains(domain, ".") || path == "" || len(s.Name) > attestation.MaxSignerName:
			return fmt.Errorf("signers: %.128q is not a signer's name", s.Name)
		case twice || isBuiltin(s.Name):
			return fmt.Errorf("signers: %q is listed twice, or is always there and must not be listed", s.Name)
		case domain == "kubernetes.io" && !s.Shared:
			return fmt.Errorf("signers: %q is not only for node-attestation-controller: set shared to true", s.Name)
		case len(s.Providers) == 0 || len(s.Providers) > 1 && !s.Shared:
			return fmt.Errorf("signers: %q must have one provider, or shared set to true", s.Name)
		}
		for _, name := range s.Providers {
			if r.rank(name) < 0 || name == InsecureProvider {
				return fmt.Errorf("signers: %q is for a provider %.64q that is not listed", s.Name, name)
			}
		}
		s.Providers = slices.Clone(s.Providers)
		r.signers[s.Name] = s
	}
	switch r.policy.InsecureSigner {
	case "":
	case InsecureSignerName:
		r.signers[InsecureSignerName] = Signer{Name: InsecureSignerName, Providers: []string{InsecureProvider}}
	default:
		return fmt.Errorf("insecureSigner: is %q, or not set", InsecureSignerName)
	}
	if len(r.policy.Signers) == 0 && r.policy.InsecureSigner == "" {
		return errors.New("signers: none is given")
	}
	return nil
}

// isBuiltin reports whether a signer must not be listed.
func isBuiltin(signer string) bool {
	return attestation.IsHelloSigner(signer) || attestation.IsRehearsalSigner(signer) || signer == InsecureSignerName
}

func (r *Rules) checkRequesters() error {
	for _, b := range r.policy.Bootstrappers {
		switch {
		case b.Username == "" || b.Group == "":
			return errors.New("bootstrappers: each has a user and a group")
		case strings.HasPrefix(b.Username, userNode), strings.HasPrefix(b.Username, userBootstrap), b.Username == "system:anonymous":
			return fmt.Errorf("bootstrappers: %.64q cannot be one", b.Username)
		case forbiddenGroup(b.Group):
			return fmt.Errorf("bootstrappers: the group %q cannot be theirs", b.Group)
		}
	}
	if forbiddenGroup(r.policy.TokenGroup) {
		return fmt.Errorf("tokenGroup: %q cannot be a token's", r.policy.TokenGroup)
	}
	return nil
}

func (r *Rules) checkServing() error {
	for i, name := range r.policy.ServingSigners {
		domain, path, _ := strings.Cut(name, "/")
		_, other := r.signers[name]
		switch {
		case !strings.Contains(domain, ".") || path == "" || len(name) > attestation.MaxSignerName:
			return fmt.Errorf("servingSigners: %.128q is not a signer's name", name)
		case other || slices.Contains(r.policy.ServingSigners[:i], name) || isBuiltin(name):
			return fmt.Errorf("servingSigners: %q is listed twice, or is for client certificates", name)
		case domain == "kubernetes.io" && name != certificatesv1.KubeletServingSignerName:
			return fmt.Errorf("servingSigners: %q is not for serving certificates", name)
		}
	}
	for i, name := range r.policy.SignedServingSigners {
		switch {
		case !slices.Contains(r.policy.ServingSigners, name) || slices.Contains(r.policy.SignedServingSigners[:i], name):
			return fmt.Errorf("signedServingSigners: %.128q is not one of servingSigners, or is listed twice", name)
		case strings.HasPrefix(name, "kubernetes.io/"):
			return fmt.Errorf("signedServingSigners: kube-controller-manager signs for %q", name)
		}
	}
	if len(r.policy.ServingSigners) > 0 && len(r.policy.ForbiddenAddresses) == 0 {
		return errors.New("forbiddenAddresses: the API server's names and addresses, and the service range, must be given with servingSigners")
	}
	var err error
	for _, entry := range r.policy.ForbiddenAddresses {
		if _, err := parseForbiddenAddresses([]string{entry}); err != nil {
			return fmt.Errorf("forbiddenAddresses: %.64q %w", entry, err)
		}
	}
	r.forbidden, err = parseForbiddenAddresses(r.policy.ForbiddenAddresses)
	return err
}

func (r *Rules) checkSources() error {
	if r.policy.TrustOnFirstUse && (r.policy.Token != Required || len(r.policy.Providers) == 0) {
		return errors.New("trustOnFirstUse: a bootstrap token must be required (token), and there must be a provider")
	}
	challenges := slices.ContainsFunc(r.policy.Providers, func(p Provider) bool { return p.Challenges })
	if len(r.policy.EKSources) == 0 && challenges && !r.policy.TrustOnFirstUse {
		return errors.New("ekSources: none is given, so no machine could be found")
	}
	if bad, ok := firstInvalid(r.policy.EKSources, EKInventory, EKPlatform, EKAnnotation); !ok {
		return fmt.Errorf("ekSources: %.64q is unknown, or is listed twice", bad)
	}
	if len(r.policy.NameSources) == 0 {
		return errors.New("nameSources: none is given")
	}
	if bad, ok := firstInvalid(r.policy.NameSources, NameInventory, NameMachine, NameHostname, NameInternalDNS, NameExternalDNS); !ok {
		return fmt.Errorf("nameSources: %.64q is unknown, or is listed twice", bad)
	}
	return nil
}

// firstInvalid returns the first item of list that is not allowed, or that occurs twice.
func firstInvalid[T comparable](list []T, allowed ...T) (T, bool) {
	for i, item := range list {
		if !slices.Contains(allowed, item) || slices.Contains(list[:i], item) {
			return item, false
		}
	}
	var none T
	return none, true
}

func (r *Rules) checkModes() error {
	for _, m := range []struct {
		name string
		mode Mode
	}{{"token", r.policy.Token}, {"credential", r.policy.Credential}, {"bootCounters", r.policy.BootCounters}} {
		if m.mode == Recover && m.name == "credential" {
			continue
		}
		if m.mode < Required || m.mode > Off {
			return fmt.Errorf("%s: must be Required, Warn or Off", m.name)
		}
	}
	if mode := r.policy.EKNotNamed; mode != 0 && mode != Required && mode != Warn {
		return errors.New("ekNotNamed: must be Required or Warn")
	}
	if r.policy.WaitDeadline < minWaitDeadline || r.policy.WaitDeadline > maxWaitDeadline {
		return fmt.Errorf("waitDeadline: must be %s to %s", minWaitDeadline, maxWaitDeadline)
	}
	return nil
}

// Needs returns the providers that the caller must have. tokens says that the caller must also know
// the machines of bootstrap tokens: otherwise no first request would ever be approved.
func (r *Rules) Needs() (providers []Provider, tokens bool) {
	providers = slices.Clone(r.policy.Providers)
	if r.policy.InsecureSigner != "" {
		providers = append(providers, Provider{Name: InsecureProvider})
	}
	return providers, r.policy.Token == Required || r.policy.InsecureSigner != ""
}

// rank returns the rank of a provider: 0 is the strongest, the insecure one is after all others,
// and -1 means unknown.
func (r *Rules) rank(provider string) int {
	if provider == InsecureProvider {
		return len(r.policy.Providers)
	}
	return slices.IndexFunc(r.policy.Providers, func(p Provider) bool { return p.Name == provider })
}

// challenges reports whether a proof of this provider follows a hello.
func (r *Rules) challenges(provider string) bool {
	return slices.ContainsFunc(r.policy.Providers, func(p Provider) bool { return p.Name == provider && p.Challenges })
}
