// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// Settings is a checked configuration, made by New. The zero value has no rules, so no controller
// starts with it.
type Settings struct {
	config Config
	rules  *verifier.Rules
	limits signing.Limits
	rates  fairqueue.Rates
	// tpm lacks the challenge keys. It is not used if config.TPM is nil.
	tpm tpm.Config
	// judges are those of the clouds by provider, without their cluster. All clusters share their
	// caches.
	judges map[string]judge
	// decisions lacks the cluster.
	decisions decisionlog.Config
}

// New checks a configuration, and reads the files of CA certificates that it names. An error names
// the field at fault.
func New(c Config) (*Settings, error) {
	s := &Settings{config: c}
	for _, step := range []func() error{
		s.checkClusterAPI, s.checkNames, s.checkSigning, s.checkInventory, s.checkPolicies, s.checkRates, s.checkDecisionLog, s.makeTPM, s.makeClouds, s.makeClusterRules,
	} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *Settings) checkNames() error {
	c := s.config
	switch {
	case c.ClusterUID == "" && c.ClusterAPI == nil:
		return errors.New("clusterUID: must be set, to a text that no other cluster has and that does not come from the cluster's own API")
	case attestation.CheckClusterUID(c.ClusterUID) != nil:
		return errors.New("clusterUID: must have 1 to 128 printable ASCII characters, and no space")
	case len(validation.IsDNS1123Label(c.Namespace)) > 0:
		return fmt.Errorf("namespace: %.64q is not the name of one", c.Namespace)
	}
	for field, name := range map[string]string{
		"challengeKeySecret": c.ChallengeKeySecret, "leaderElection.leaseName": c.LeaderElection.LeaseName,
	} {
		if len(validation.IsDNS1123Subdomain(name)) > 0 {
			return fmt.Errorf("%s: %.64q is not an object's name", field, name)
		}
	}
	for field, address := range map[string]string{"metricsBindAddress": c.MetricsBindAddress, "healthBindAddress": c.HealthBindAddress} {
		if address == "" {
			return fmt.Errorf("%s: must be host:port, or 0 for none", field)
		}
	}
	return nil
}

func (s *Settings) checkSigning() error {
	g := s.config.Signing
	files, secret := g.CAFile != "" || g.KeyFile != "", g.SecretName != ""
	switch g.Mode {
	case Sign:
		switch {
		case s.config.ClusterAPI != nil && (files || secret):
			return errors.New("signing: with clusterAPI the CA is in each cluster's own Secret")
		case s.config.ClusterAPI == nil && files == secret:
			return errors.New("signing: mode Sign needs caFile and keyFile, or secretName, and not both")
		case files && (g.CAFile == "" || g.KeyFile == ""):
			return errors.New("signing: caFile and keyFile go together")
		case files && (!filepath.IsAbs(g.CAFile) || !filepath.IsAbs(g.KeyFile)):
			return errors.New("signing: caFile and keyFile must be absolute paths")
		case secret && len(validation.IsDNS1123Subdomain(g.SecretName)) > 0:
			return fmt.Errorf("signing.secretName: %.64q is not an object's name", g.SecretName)
		case secret && g.SecretName == s.config.ChallengeKeySecret:
			return errors.New("signing.secretName: must differ from challengeKeySecret")
		}
		for _, signer := range s.config.Signers {
			if strings.HasPrefix(signer.Name, "kubernetes.io/") {
				return fmt.Errorf("signers: kube-controller-manager signs for %.128q: set signing.mode to ApproveOnly", signer.Name)
			}
		}
	case ApproveOnly:
		switch {
		case files || secret:
			return errors.New("signing: mode ApproveOnly uses no CA")
		case s.config.Signers == nil:
			return errors.New("signers: must name, with signing.mode ApproveOnly, those that another signer issues for")
		}
	case "":
		return errors.New("signing.mode: must be set: Sign or ApproveOnly")
	default:
		return fmt.Errorf("signing.mode: %.64q is neither Sign nor ApproveOnly", g.Mode)
	}
	if s.config.Signers == nil {
		s.config.Signers = s.config.defaultSigners()
	}
	l := s.config.Lifetimes
	s.limits = signing.Limits{Default: l.Default.Duration, Min: l.Min.Duration, Max: l.Max.Duration, Backdate: l.Backdate.Duration}
	if err := s.limits.Check(); err != nil {
		return fmt.Errorf("lifetimes: %w", err)
	}
	return nil
}

// maxInventoryParts bounds the parts of an inventory, since each is read every half second.
const maxInventoryParts = 64

func (s *Settings) checkInventory() error {
	i := s.config.Inventory
	var forms []string
	for _, form := range []struct {
		field string
		set   bool
	}{{"file", i.File != ""}, {"files", i.Files != nil}, {"configMap", i.ConfigMap != nil}, {"configMaps", i.ConfigMaps != nil}} {
		if form.set {
			forms = append(forms, form.field)
		}
	}
	parts := len(i.Paths()) + len(i.Entries())
	switch {
	case s.config.ClusterAPI != nil && !slices.Contains(s.config.ClusterAPI.EKSources, verifier.EKInventory):
		if len(forms) > 0 {
			return errors.New("inventory: is not used: add Inventory to clusterAPI.ekSources")
		}
		return nil
	case s.config.ClusterAPI != nil && (i.ConfigMap != nil || i.ConfigMaps != nil):
		return errors.New("inventory.configMap: with clusterAPI, mount it as a file")
	case len(forms) == 0:
		return errors.New("inventory: must be set, file, files, configMap or configMaps: without a source of endorsement keys no machine would be found")
	case len(forms) > 1:
		return fmt.Errorf("inventory: has %s, and must have one of them", strings.Join(forms, " and "))
	case parts == 0:
		return fmt.Errorf("inventory.%s: is empty", forms[0])
	case parts > maxInventoryParts:
		return fmt.Errorf("inventory.%s: has more than %d entries", forms[0], maxInventoryParts)
	}
	for n, path := range i.Paths() {
		switch {
		case !filepath.IsAbs(path):
			return fmt.Errorf("inventory.%s: %.128q must be an absolute path", forms[0], path)
		case slices.Contains(i.Paths()[:n], path):
			return fmt.Errorf("inventory.%s: %.128q is listed twice", forms[0], path)
		}
	}
	for n, entry := range i.Entries() {
		switch {
		case len(validation.IsDNS1123Subdomain(entry.Name)) > 0:
			return fmt.Errorf("inventory.%s.name: %.64q is not an object's name", forms[0], entry.Name)
		case len(validation.IsConfigMapKey(entry.Key)) > 0:
			return fmt.Errorf("inventory.%s.key: %.64q is no key of a ConfigMap", forms[0], entry.Key)
		case slices.Contains(i.Entries()[:n], entry):
			return fmt.Errorf("inventory.%s: key %.64q of %.64q is listed twice", forms[0], entry.Key, entry.Name)
		}
	}
	return nil
}

func (s *Settings) checkPolicies() error {
	p := s.config.Policies
	if p.Mode != modeRequired && p.Mode != modeWarn {
		return fmt.Errorf("policies.mode: %.64q is not Required or Warn", p.Mode)
	}
	for i, name := range p.Controllers {
		if name == "" || strings.ContainsAny(name, `'"\\`) || slices.Contains(p.Controllers[:i], name) {
			return fmt.Errorf("policies.controllers: %.128q is not a user's name, or is listed twice", name)
		}
	}
	return nil
}

func (s *Settings) checkRates() error {
	rate := func(r Rate) fairqueue.Rate { return fairqueue.Rate{Every: r.Every.Duration, Burst: r.Burst} }
	r := s.config.Rates
	s.rates = fairqueue.Rates{Requester: rate(r.PerRequester), Cluster: rate(r.PerCluster), Machine: rate(r.PerMachine)}
	if err := s.rates.Check(); err != nil {
		return fmt.Errorf("rates.%w", err)
	}
	return nil
}

// checkDecisionLog does not open the file: a full disk must not keep the controller from starting.
func (s *Settings) checkDecisionLog() error {
	c := s.config.DecisionLog
	switch {
	case c.File != "" && !filepath.IsAbs(c.File):
		return errors.New("decisionLog.file: must be an absolute path")
	case c.Archive && c.File == "":
		return errors.New("decisionLog.archive: needs decisionLog.file")
	}
	return nil
}

// makeClusterRules makes the rules of the only cluster. With ClusterAPI it only checks that the
// rules of a workload cluster can be made.
func (s *Settings) makeClusterRules() error {
	if s.config.ClusterAPI != nil {
		_, err := s.ForWorkload(placeholderWorkload)
		return err
	}
	return s.makeRules()
}

func (s *Settings) makeRules() error {
	c := s.config
	policy := verifier.Policy{
		Cluster:        c.ClusterUID,
		Providers:      c.makeProviders(),
		SharedHello:    c.SharedHello,
		InsecureSigner: c.InsecureSigner,
		TokenGroup:     c.TokenGroup,

		ServingSigners:     c.Serving.Signers,
		ForbiddenAddresses: c.Serving.ForbiddenAddresses,

		EKSources:    []verifier.EKSource{verifier.EKInventory},
		NameSources:  []verifier.NameSource{verifier.NameInventory},
		WaitDeadline: c.WaitDeadline.Duration,

		UnattestedNodes: c.UnattestedNodes, // checked by verifier.New
	}
	if c.Signing.Mode == Sign {
		policy.SignedServingSigners = c.Serving.ownSigners()
	}
	if m := c.ClusterAPI; m != nil {
		policy.EKSources, policy.NameSources, policy.TrustOnFirstUse = m.EKSources, m.NodeNames, m.TrustOnFirstUse
	}
	for _, signer := range c.Signers {
		providers, err := c.providersOf(signer)
		if err != nil {
			return err
		}
		policy.Signers = append(policy.Signers, verifier.Signer{Name: signer.Name, Providers: providers, Shared: signer.Shared})
	}
	for _, b := range c.Bootstrappers {
		policy.Bootstrappers = append(policy.Bootstrappers, verifier.Bootstrapper{Username: b.Username, Group: b.Group})
	}
	for _, m := range []struct {
		field string
		mode  Mode
		into  *verifier.Mode
	}{{"token", c.Token, &policy.Token}, {"credential", c.Credential, &policy.Credential}, {"bootCounters", c.BootCounters, &policy.BootCounters}} {
		mode, ok := map[Mode]verifier.Mode{modeRequired: verifier.Required, modeWarn: verifier.Warn, modeOff: verifier.Off}[m.mode]
		switch {
		case m.mode == modeRecover && m.field == "credential":
			mode = verifier.Recover
		case !ok && m.field == "credential":
			return fmt.Errorf("credential: %.64q is not Recover, Required, Warn or Off", m.mode)
		case !ok:
			return fmt.Errorf("%s: %.64q is not Required, Warn or Off", m.field, m.mode)
		}
		*m.into = mode
	}
	var ok bool
	policy.EKNotNamed, ok = map[Mode]verifier.Mode{"": 0, modeRequired: verifier.Required, modeWarn: verifier.Warn}[c.EKNotNamed]
	if !ok {
		return fmt.Errorf("ekNotNamed: %.64q is not Required or Warn", c.EKNotNamed)
	}
	if c.WaitDeadline.Duration == 0 {
		return errors.New("waitDeadline: must not be 0")
	}
	var err error
	s.rules, err = verifier.New(policy)
	return err
}

// ownSigners returns the signers for which this controller signs. kube-controller-manager signs for
// Kubernetes' own signers.
func (s Serving) ownSigners() []string {
	return slices.DeleteFunc(slices.Clone(s.Signers), func(name string) bool { return strings.HasPrefix(name, "kubernetes.io/") })
}

// maxCAs limits a file of CA certificates, in bytes. The CAs of all TPM manufacturers together need
// less.
const maxCAs = 4 << 20

func (s *Settings) makeTPM() error {
	t := s.config.TPM
	if t == nil {
		return nil
	}
	s.tpm = tpm.Config{
		NamedEKs: true, EventLog: t.EventLog, EventLogPCRs: t.EventLogPCRs, ClusterUID: s.config.ClusterUID, ChallengeLifetime: t.ChallengeLifetime.Duration,
		PCRs:            attestation.PCRSelection{Bank: t.PCRs.Bank, Indexes: t.PCRs.Indexes},
		MinimumFirmware: map[string]uint64{},
	}
	if t.PCRs.Bank == "" || len(t.PCRs.Indexes) == 0 {
		return errors.New("tpm.pcrs: must be set, bank and indexes")
	}
	if t.ChainTime != nil {
		s.tpm.ChainTime = t.ChainTime.Time
	}
	for _, f := range []struct {
		field, path string
		into        *[]*x509.Certificate
	}{{"tpm.rootsFile", t.RootsFile, &s.tpm.Roots}, {"tpm.intermediatesFile", t.IntermediatesFile, &s.tpm.Intermediates}} {
		if f.path == "" {
			continue
		}
		var err error
		if *f.into, err = readCAs(f.path); err != nil {
			return fmt.Errorf("%s: %w", f.field, err)
		}
	}
	for _, f := range []struct {
		field string
		list  []string
		into  *[]tpm.Fingerprint
	}{{"tpm.allowedEKs", t.AllowedEKs, &s.tpm.AllowedEKs}, {"tpm.deniedEKs", t.DeniedEKs, &s.tpm.DeniedEKs}} {
		for _, value := range f.list {
			fingerprint, err := tpm.ParseFingerprint(value)
			if err != nil {
				return fmt.Errorf("%s: %.80q: %w", f.field, value, err)
			}
			*f.into = append(*f.into, fingerprint)
		}
	}
	var err error
	if s.tpm.PCRValues, err = parseValues("tpm.pcrs.values", t.PCRs.Values); err != nil {
		return err
	}
	for maker, version := range t.MinimumFirmware {
		least, err := strconv.ParseUint(version, 16, 64)
		if err != nil || len(version) != 16 {
			return fmt.Errorf("tpm.minimumFirmware: %.32q of %.32q is not 16 hexadecimal digits", version, maker)
		}
		s.tpm.MinimumFirmware[maker] = least
	}
	// This checks everything but the keys. The random keys are thrown away.
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	tried := *s
	if s.config.ClusterAPI != nil {
		tried.tpm.ClusterUID = placeholderWorkload.UID
	}
	if _, err := tried.Verifier(tpm.Keys{Current: "none", ByID: map[string][]byte{"none": key}}); err != nil {
		return fmt.Errorf("tpm: %w", err)
	}
	return nil
}

// parseValues parses the allowed values of PCRs.
func parseValues(field string, all map[string][]string) (map[int][][]byte, error) {
	parsed := map[int][][]byte{}
	for index, values := range all {
		n, err := strconv.Atoi(index)
		if err != nil || strconv.Itoa(n) != index {
			return nil, fmt.Errorf("%s: %.16q is not the number of a PCR", field, index)
		}
		parsed[n] = nil
		for _, value := range values {
			digest, err := hex.DecodeString(value)
			if err != nil {
				return nil, fmt.Errorf("%s: a value of PCR %d is not in hex", field, n)
			}
			parsed[n] = append(parsed[n], digest)
		}
	}
	return parsed, nil
}

// readCAs reads at least one certificate in PEM. It skips text between the blocks, since people
// write comments there. A broken block is an error.
func readCAs(path string) ([]*x509.Certificate, error) {
	data, err := bounded.ReadFile(path, maxCAs)
	if err != nil {
		return nil, err
	}
	var all []*x509.Certificate
	for rest := data; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("%s: there is a PEM block of type %.40q", path, block.Type)
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%s: certificate %d: %w", path, len(all)+1, err)
		}
		all = append(all, certificate)
	}
	if len(all) == 0 || len(all) != bytes.Count(data, []byte("-----BEGIN ")) {
		return nil, fmt.Errorf("%s: holds no certificate in PEM, or a broken block", path)
	}
	return all, nil
}

// Config returns the configuration, with defaults for unset fields.
func (s *Settings) Config() Config { return s.config }

// Rules returns the policy.
func (s *Settings) Rules() *verifier.Rules { return s.rules }

// Verifier returns the verifier of TPMs with these challenge keys. It returns nil without the
// provider tpm.
func (s *Settings) Verifier(keys tpm.Keys) (*tpm.Verifier, error) {
	if s.config.TPM == nil {
		return nil, nil
	}
	c := s.tpm
	c.Keys = keys
	return tpm.New(c)
}

// ca returns the source of the CA, nil if another signer issues. The CA may sign if the API server
// trusts it, and if that is not known.
func (s *Settings) ca(reader client.Reader) signing.Source {
	g := s.config.Signing
	if g.Mode != Sign {
		return nil
	}
	var ca signing.Source = signing.NewFiles(g.CAFile, g.KeyFile)
	if g.SecretName != "" {
		ca = sources.NewSecretCA(reader, s.namespaced(g.SecretName))
	}
	return sources.NewComparedCA(ca, reader)
}

// inventoryAge bounds how stale the inventory file may be. While it is read again, the last value
// may be two seconds older. Many concurrent requests share one read.
const inventoryAge = 500 * time.Millisecond

// machineSource knows the machines of a cluster, and their bootstrap tokens.
type machineSource interface {
	evidence.MachineSource
	evidence.TokenSource
}

// Machines returns the inventory as the source of machines.
func (s *Settings) Machines(reader client.Reader) machineSource {
	i := s.config.Inventory
	if paths := i.Paths(); len(paths) > 0 {
		return sources.NewFileInventory(paths, inventoryAge)
	}
	var entries []sources.ConfigMapEntry
	for _, entry := range i.Entries() {
		entries = append(entries, sources.ConfigMapEntry{ConfigMap: s.namespaced(entry.Name), Key: entry.Key})
	}
	return sources.NewConfigMapInventory(reader, entries...)
}

// Keys returns the store of challenge keys.
func (s *Settings) Keys(reader client.Reader, writer client.Client) *sources.KeyStore {
	return sources.NewKeyStore(reader, writer, s.namespaced(s.config.ChallengeKeySecret), s.Verifier)
}

func (s *Settings) namespaced(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: s.config.Namespace, Name: name}
}

// OpenDecisionLog opens the decision log of this configuration, for the controllers of this
// process. The result is nil if the decision records go to the process log. The caller closes the
// Log after the controllers have stopped. Call it before Controller and Assemble.
func (s *Settings) OpenDecisionLog(process decisionlog.Controller, log logr.Logger, metrics *telemetry.DecisionLogMetrics) *decisionlog.Log {
	c := s.config.DecisionLog
	s.decisions = decisionlog.Config{Archive: c.Archive, Controller: process}
	if c.File != "" {
		s.decisions.Log = decisionlog.New(log, metrics, decisionlog.NewFile(c.File))
	}
	return s.decisions.Log
}

// Controller returns the configuration of a controller whose sources read without a cache. The
// caller must run the KeyStore, a manager's Runnable.
func (s *Settings) Controller(reader client.Reader, writer client.Client) (controller.Config, *sources.KeyStore) {
	keys := s.Keys(reader, writer)
	return s.Assemble(keys, s.Machines(reader), s.ca(reader)), keys
}

// Assemble returns the configuration of a controller with these keys, machines and CA. The CA is
// nil if another signer issues.
func (s *Settings) Assemble(keys *sources.KeyStore, machines machineSource, ca signing.Source) controller.Config {
	var providers []evidence.Provider
	if s.config.TPM != nil {
		providers = append(providers, tpmprovider.Provider{Latest: keys.Verifier})
	}
	for _, p := range s.CloudProviders(machines) {
		providers = append(providers, p)
	}
	if s.config.InsecureSigner != "" {
		providers = append(providers, evidence.FromSigner(verifier.InsecureProvider, evidence.InsecureSigner{Tokens: machines}))
	}
	decisions := s.decisions
	decisions.Cluster.UID = s.config.ClusterUID
	return controller.Config{
		Rules:     s.rules,
		Providers: providers,
		Machines:  machines,
		CA:        ca,
		Limits:    s.limits,
		Rates:     s.rates,
		Namespace: s.config.Namespace,
		Audit:     s.config.Audit,
		Decisions: decisions,

		AcceptedEKChanges: keys,

		TrustUnnamed: s.config.ClusterAPI != nil && s.config.ClusterAPI.TrustAnyTPM,
	}
}

// PolicyCheck returns the check that compares the admission policies of the cluster that nodes join
// with the release's. connection is another way to the same cluster as the client.
func (s *Settings) PolicyCheck(api client.Client, connection *rest.Config) *preflight.PolicyCheck {
	check := &preflight.PolicyCheck{
		Scope: policyset.Alone, Client: api, Others: s.config.Policies.Controllers, Audit: s.config.Audit,
		Static: &preflight.StaticProber{Config: connection, Namespace: s.conditionNamespace()},
	}
	if s.config.ClusterAPI != nil {
		check.Scope, check.User = policyset.Workload, s.config.ClusterAPI.User
	}
	return check
}

// ManagementPolicyCheck returns the same check for a management cluster.
func (s *Settings) ManagementPolicyCheck(api client.Client, connection *rest.Config) *preflight.PolicyCheck {
	return &preflight.PolicyCheck{
		Scope: policyset.Management, Client: api, Others: s.config.Policies.Controllers, Audit: s.config.Audit,
		Static: &preflight.StaticProber{Config: connection, Namespace: s.config.Namespace},
	}
}

// PolicyWatch returns the configuration of a watch of the admission policies.
func (s *Settings) PolicyWatch(check *preflight.PolicyCheck, metrics *telemetry.ClusterMetrics) preflight.WatchConfig {
	namespace := s.config.Namespace
	if check.Scope == policyset.Workload {
		namespace = s.conditionNamespace()
	}
	return preflight.WatchConfig{Check: check, Namespace: namespace, Metrics: metrics}
}

// conditionNamespace returns the Namespace with the conditions, in the cluster that nodes join.
func (s *Settings) conditionNamespace() string {
	if m := s.config.ClusterAPI; m != nil {
		return m.userNamespace()
	}
	return s.config.Namespace
}

// Preflight returns the check before enforcement. The caller calls Await before the manager starts,
// and then runs it as a manager's Runnable. If policies.mode is Required, the policies must be in
// force.
func (s *Settings) Preflight(keys *sources.KeyStore, records client.Reader, metrics *telemetry.ClusterMetrics, log logr.Logger, policies ...*preflight.PolicyCheck) *preflight.Preflight {
	if s.config.Policies.Mode != modeRequired {
		policies = nil
	}
	return &preflight.Preflight{
		Policies: policies,
		Keys:     keys, Records: records, Cluster: s.config.ClusterUID, Namespace: s.config.Namespace, Unattested: s.rules.UnattestedNodes,
		Audit: s.config.Audit, Metrics: metrics, Log: log,
	}
}
