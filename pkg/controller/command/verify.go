// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/cloudprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

func (i *invocation) verifyCommand() *cobra.Command {
	var at, keys string
	var machines []string
	c := &cobra.Command{
		Use:   "verify FILE...",
		Short: "Judge certificate requests by the policy in the configuration, offline",
		Long: `verify judges CertificateSigningRequests by the policy in --config, without any API server: manifests in YAML or JSON, such as
kubectl get csr -o yaml prints, the PEM of spec.request, or decision records with an archive. A proof needs its hello among the
files, and the challenge keys. Evidence of ec2-role cannot be judged offline. That of gce needs gce.keysFile, with Google's keys of that
time, and that of azure an inventory with the instance. A decision record has its hello, and is judged at the time of its decision. What operators revoked,
suspended or resumed is printed, and does not count.

verify assumes that there is no record and no Node of that name. With PEM it also assumes requester, signer and usages. So a
renewal passes here only where a lost record would be made again (credential: Recover). What was decided on a request before does not
count, except that a decision record has to agree with what its archive shows.

The exit code is 0 if all pass, and 21 if one does not. A record of a denial passes if it agrees with its archive.`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cli.Usage(fmt.Errorf("no file is named for %s", c.CommandPath()))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			now := time.Now()
			if at != "" {
				var err error
				if now, err = time.Parse(time.RFC3339, at); err != nil {
					return cli.Usage(fmt.Errorf("--time %.64q: must be like 2006-01-02T15:04:05Z", at))
				}
			}
			v, err := i.newJudge(c.Context(), machines, keys, now)
			if err != nil {
				return err
			}
			v.fixedTime = at != ""
			return v.verify(c.Context(), args)
		},
	}
	c.Flags().StringVar(&at, "time", "", "time to judge at, RFC 3339 (default: now, or when a record's decision was made)")
	c.Flags().StringArrayVar(&machines, "inventory", nil, "inventory file in the place of the configuration's; may be repeated")
	c.Flags().StringVar(&keys, "challenge-keys", "", "manifest of the Secret with the challenge keys, to judge proofs with")
	return c
}

// offlineJudge judges requests offline.
type offlineJudge struct {
	out io.Writer
	now time.Time
	// fixedTime says that --time set now, for decision records too.
	fixedTime bool
	settings  *config.Settings
	provider  tpmprovider.Provider
	clouds    []cloudprovider.Provider
	machines  []verifier.Machine
	hasKeys   bool
	requests  []requestFile
}

// requestFile is a request to be judged.
type requestFile struct {
	file   string
	object *certificatesv1.CertificateSigningRequest
	// at is the time to judge at. created is when the API server stored the request, or at if that
	// is not known.
	at, created time.Time
	// assumed says that all fields except spec.request were assumed.
	assumed bool
	// decided is set if the request is from the archive of a decision record, and hello is its
	// hello.
	decided *decisionlog.Record
	hello   *certificatesv1.CertificateSigningRequest
	// revocation is set if there is no request: the line is about an operator's action.
	revocation *decisionlog.Revocation
}

func (i *invocation) newJudge(ctx context.Context, machines []string, keys string, now time.Time) (*offlineJudge, error) {
	settings, err := i.settings()
	if err != nil {
		return nil, err
	}
	if settings.Config().ClusterAPI != nil {
		return nil, misconfigured(errors.New("verify needs the configuration of one cluster, with clusterUID and inventory and without clusterAPI"))
	}
	j := &offlineJudge{out: i.Stdout, now: now, settings: settings, hasKeys: keys != ""}
	if len(machines) == 0 {
		machines = settings.Config().Inventory.Paths()
	}
	if len(machines) == 0 {
		return nil, misconfigured(errors.New("the configuration's inventory is in the cluster: name a file with --inventory"))
	}
	source := sources.NewFileInventory(machines, 0)
	if j.machines, err = source.Machines(ctx, now); err == nil {
		err = source.Problem() // one of several files may be invalid
	}
	if err != nil {
		return nil, misconfigured(err)
	}
	secrets := tpm.Keys{Current: "none", ByID: map[string][]byte{"none": make([]byte, 32)}}
	_, _ = rand.Read(secrets.ByID["none"]) // never fails
	if keys != "" {
		if secrets, err = readKeys(keys); err != nil {
			return nil, misconfigured(fmt.Errorf("challenge keys %s: %w", keys, err))
		}
	}
	if j.provider.Verifier, err = settings.Verifier(secrets); err != nil {
		return nil, err
	}
	j.clouds, err = settings.OfflineProviders(fixedMachines(j.machines))
	return j, err
}

// fixedMachines is an evidence.MachineSource that does not change.
type fixedMachines []verifier.Machine

// Machines returns the machines.
func (m fixedMachines) Machines(context.Context, time.Time) ([]verifier.Machine, error) {
	return slices.Clone(m), nil
}

func readKeys(path string) (tpm.Keys, error) {
	data, err := bounded.ReadFile(path, maxFile)
	if err != nil {
		return tpm.Keys{}, err
	}
	secret := &corev1.Secret{}
	if err := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), len(data)+1).Decode(secret); err != nil || secret.Kind != "Secret" {
		// an error of the parser might quote the content
		return tpm.Keys{}, errors.New("it holds no Secret")
	}
	return sources.ParseKeys(secret.Data)
}

// verify judges all requests in the files.
func (j *offlineJudge) verify(ctx context.Context, files []string) error {
	for _, file := range files {
		found, err := j.read(file)
		if err == nil && len(found) == 0 {
			err = errors.New("it holds no CertificateSigningRequest")
		}
		if err != nil {
			return cli.Usage(fmt.Errorf("%s: %w", file, err))
		}
		j.requests = append(j.requests, found...)
	}
	judged, refused := 0, 0
	for _, r := range j.requests {
		if r.revocation != nil {
			j.showRevocation(r)
			continue
		}
		judged++
		if !j.show(ctx, r) {
			refused++
		}
	}
	if refused > 0 {
		return cli.Fail(codeRefused, "", fmt.Errorf("%d of %d requests do not pass", refused, judged))
	}
	return nil
}

// maxFile bounds a file, in bytes.
const maxFile = 64 << 20

func (j *offlineJudge) read(path string) ([]requestFile, error) {
	data, err := bounded.ReadFile(path, maxFile)
	switch {
	case err != nil:
		return nil, err
	case bytes.HasPrefix(data, []byte("-----BEGIN ")):
		return []requestFile{{file: path, object: j.assume(path, data), at: j.now, created: j.now, assumed: true}}, nil
	}
	var all []requestFile
	decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		var document json.RawMessage
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		requests, err := j.requestsIn(document)
		if err != nil {
			return nil, err
		}
		for _, r := range requests {
			r.file = path
			all = append(all, r)
		}
	}
}

// requestsIn returns the requests in a document: itself, the items of a list, or the one of a
// decision record. A revocation record is returned, too, without a request.
func (j *offlineJudge) requestsIn(document json.RawMessage) ([]requestFile, error) {
	if len(bytes.TrimSpace(document)) == 0 || string(document) == "null" {
		return nil, nil
	}
	var head struct {
		metav1.TypeMeta `json:",inline"`
		Items           []json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(document, &head); err != nil {
		return nil, err
	}
	if head.Kind == "List" || head.Kind == "CertificateSigningRequestList" {
		var all []requestFile
		for _, item := range head.Items {
			requests, err := j.requestsIn(item)
			if err != nil {
				return nil, err
			}
			all = append(all, requests...)
		}
		return all, nil
	}
	switch head.Kind {
	case decisionlog.Kind:
		r, err := j.fromDecisionRecord(document)
		return []requestFile{r}, err
	case decisionlog.KindRevocation:
		revocation, err := decisionlog.ParseRevocation(document)
		if err != nil {
			return nil, fmt.Errorf("a revocation record: %w", err)
		}
		return []requestFile{{revocation: revocation}}, nil
	}
	if head.Kind != "CertificateSigningRequest" || head.APIVersion != certificatesv1.SchemeGroupVersion.String() {
		return nil, fmt.Errorf("there is a %.64q of %.64q, and no CertificateSigningRequest of %s", head.Kind, head.APIVersion, certificatesv1.SchemeGroupVersion)
	}
	object := &certificatesv1.CertificateSigningRequest{}
	if err := json.Unmarshal(document, object); err != nil {
		return nil, err
	}
	// Judge the request as it was before a decision, and without its age: then the report says what
	// it would wait for.
	created := object.CreationTimestamp.Time
	if created.IsZero() {
		created = j.now
	}
	object.Status, object.CreationTimestamp = certificatesv1.CertificateSigningRequestStatus{}, metav1.Time{}
	return []requestFile{{object: object, at: j.now, created: created}}, nil
}

// assume returns the object that a node with a bootstrap token would file with these bytes.
func (j *offlineJudge) assume(path string, data []byte) *certificatesv1.CertificateSigningRequest {
	c := j.settings.Config()
	object := &certificatesv1.CertificateSigningRequest{}
	object.Name, object.UID = filepath.Base(path), "assumed"
	group := c.TokenGroup
	if group == "" {
		group = "system:bootstrappers"
	}
	object.Spec = certificatesv1.CertificateSigningRequestSpec{
		Request: data, Username: "system:bootstrap:000000", Groups: []string{group, "system:authenticated"},
		Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
	}
	if len(c.Signers) > 0 {
		object.Spec.SignerName = c.Signers[0].Name
	}
	content, err := attestation.Parse(data)
	if err != nil {
		return object // the rules report what is wrong
	}
	if _, kind := attestation.Head(content.Data); kind == attestation.KindHello {
		object.Spec.SignerName = attestation.HelloSignerName
	}
	if asks, err := x509.ParseCertificateRequest(content.PKCS10); err == nil {
		if _, isRSA := asks.PublicKey.(*rsa.PublicKey); isRSA {
			object.Spec.Usages = append(object.Spec.Usages, certificatesv1.UsageKeyEncipherment)
		}
	}
	return object
}

// decide applies the rules to a request as the controller would.
func (j *offlineJudge) decide(ctx context.Context, r requestFile, claim verifier.Claim) (verifier.Decision, verifier.Evidence, collect.Subject) {
	object := r.object
	in := verifier.Input{Now: r.at, Request: object, Machines: j.machines, Node: verifier.Absent}
	var judge evidence.Provider
	for _, p := range j.clouds {
		if claim.Provider == p.Name() {
			judge = p
			asFiled := object.DeepCopy()
			asFiled.CreationTimestamp = metav1.NewTime(r.created)
			in.Evidence = p.Verify(ctx, evidence.Question{Request: asFiled, Now: r.at})
		}
	}
	if claim.Provider == j.provider.Name() && j.provider.Verifier != nil {
		judge = j.provider
		if name, err := j.provider.HelloOf(object); err == nil && !claim.Hello {
			if in.Hello = r.hello; r.decided == nil {
				in.Hello = j.named(name)
			}
		}
		ek := j.provider.EK(object, in.Hello)
		named := ek != "" && slices.ContainsFunc(j.machines, func(m verifier.Machine) bool {
			return slices.ContainsFunc(m.EKs, func(n verifier.NamedEK) bool { return n.EK == ek })
		})
		in.Evidence = j.provider.Verify(ctx, evidence.Question{Request: object, Hello: in.Hello, Named: named, Now: r.at})
	}
	d := j.settings.Rules().Judge(in)
	return d, in.Evidence, collect.Describe(judge, object, in.Hello, claim, in.Evidence, d.Class)
}

func (j *offlineJudge) named(name string) *certificatesv1.CertificateSigningRequest {
	for _, r := range j.requests {
		if r.decided == nil && r.object != nil && r.object.Name == name {
			return r.object
		}
	}
	return nil
}

// checks group the rules by subject, in the order in which they are judged. Reasons that are in no
// group are shown under evidence.
var checks = []struct {
	name    string
	reasons []verifier.Reason
}{
	{"request", []verifier.Reason{
		verifier.ReasonMalformedRequest, verifier.ReasonProviderMismatch, verifier.ReasonUnsupportedKey, verifier.ReasonSubjectMismatch,
		verifier.ReasonForbiddenExtension, verifier.ReasonUsageMismatch,
	}},
	{"requester", []verifier.Reason{verifier.ReasonRequesterNotAllowed, verifier.ReasonTokenNotForMachine, verifier.ReasonUnknownCredential}},
	{"hello", []verifier.Reason{verifier.ReasonProofMismatch, verifier.ReasonHelloNotFound}},
	{"evidence", nil},
	{"machine", []verifier.Reason{
		verifier.ReasonMachineNotFound, verifier.ReasonAmbiguousMachine, verifier.ReasonProviderIDMismatch, verifier.ReasonMachineNotReady, verifier.ReasonMachineDeleting,
		verifier.ReasonTrustExpired,
	}},
	{"node name", []verifier.Reason{
		verifier.ReasonNodeNameUnknown, verifier.ReasonNodeNameMismatch, verifier.ReasonAmbiguousName, verifier.ReasonNodeAlreadyRegistered,
	}},
	{"record", []verifier.Reason{verifier.ReasonIdentityBound, verifier.ReasonBootCountersWentBack, verifier.ReasonAKChanged, verifier.ReasonEKNotNamed}},
}

// checkOf returns the name of the check that a reason belongs to.
func checkOf(reason verifier.Reason) string {
	for _, check := range checks {
		if slices.Contains(check.reasons, reason) {
			return check.name
		}
	}
	return "evidence"
}

// show prints the decision on a request, and reports whether the request passes.
func (j *offlineJudge) show(ctx context.Context, r requestFile) bool {
	if r.decided != nil {
		return j.showDecisionRecord(r, func() (verifier.Decision, verifier.Evidence, collect.Subject) {
			claim, _ := j.settings.Rules().ParseClaim(r.object)
			return j.showJudged(ctx, r, claim)
		})
	}
	claim, ours := j.settings.Rules().ParseClaim(r.object)
	kind := "proof"
	if claim.Hello {
		kind = "hello"
	}
	j.print("%s: %.253q, %s for node %q", r.file, r.object.Name, kind, claim.NodeName)
	if !ours {
		j.print("  not judged: signer %.571q, or its evidence, is not this controller's", r.object.Spec.SignerName)
		return false
	}
	if r.assumed {
		j.print("  assumed: signer %s, filed by %s", r.object.Spec.SignerName, r.object.Spec.Username)
	}
	d, _, _ := j.showJudged(ctx, r, claim)
	return passes(d)
}

// passes reports whether a decision lets a request pass.
func passes(d verifier.Decision) bool {
	return d.Outcome == verifier.Challenge || d.Outcome == verifier.Approve || d.Outcome == verifier.Rehearsed
}

// showJudged judges a request, and prints the result of each check.
func (j *offlineJudge) showJudged(ctx context.Context, r requestFile, claim verifier.Claim) (verifier.Decision, verifier.Evidence, collect.Subject) {
	d, shown, about := j.decide(ctx, r, claim)
	j.print("  %s", about)
	failed := false
	for _, check := range checks {
		of := func(all verifier.Refusals) (found []verifier.Refusal) {
			for _, refusal := range all {
				if checkOf(refusal.Reason) == check.name {
					found = append(found, refusal)
				}
			}
			return found
		}
		refusals := of(d.Refusals)
		for _, refusal := range refusals {
			j.print("  FAIL  %-9s  %s", check.name, refusal)
		}
		for _, warning := range of(d.Warnings) {
			j.print("  warn  %-9s  %s", check.name, warning)
		}
		switch {
		case len(refusals) > 0:
			failed = true
		case failed: // a later rule may need the result of one that failed
			j.print("  -     %-9s  nothing found, as far as it could be judged", check.name)
		default:
			j.print("  pass  %s", check.name)
		}
	}
	if err := shown.Err; err != nil && !evidence.IsVerdict(err) {
		j.print("  note: %v", err)
	}
	if !passes(d) && !claim.Hello && !j.hasKeys && claim.Provider == tpm.Provider {
		j.print("  note: without --challenge-keys no proof passes")
	}
	j.print("  %s", map[bool]string{true: "passed", false: "refused"}[passes(d)]+", class "+d.Class.String()+", outcome "+d.Outcome.String())
	return d, shown, about
}

// print prints a line. Text of peers adds no line to it.
func (j *offlineJudge) print(format string, arguments ...any) {
	_, _ = fmt.Fprintf(text.EntryWriter(j.out), format, arguments...)
}
