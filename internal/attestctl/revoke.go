// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

const (
	// maxSelected is how many nodes a NodeRevocation names at most, by its CRD.
	maxSelected = 1000
	// The limits of the CRD.
	maxSpread = 7 * 24 * time.Hour
	maxLimit  = 30 * 24 * time.Hour
	// waitBeyond is how long a command waits by default, after the last certificate is revoked.
	waitBeyond = time.Hour
)

// revokeFlags are those of revoke and rotate.
type revokeFlags struct {
	all, now             bool
	selector, before     string
	reason               string
	spread, limit        time.Duration
	dryRun, yes, waitFor bool
	timeout              time.Duration
}

// addCommon adds the flags that all commands for revocation have.
func (f *revokeFlags) addCommon(c *cobra.Command, timeout time.Duration) {
	c.Flags().BoolVar(&f.dryRun, "dry-run", false, "say what would happen, and change nothing")
	c.Flags().BoolVarP(&f.yes, "yes", "y", false, "do not ask")
	c.Flags().BoolVar(&f.waitFor, "wait", true, "wait, and show the progress")
	c.Flags().DurationVar(&f.timeout, "timeout", timeout, "how long to wait; 0 waits without an end")
}

func (f *revokeFlags) addSelection(c *cobra.Command) {
	c.Flags().BoolVar(&f.all, "all", false, "all nodes of the cluster that have a record")
	c.Flags().StringVar(&f.before, "issued-before", "", "only certificates requested before this time: RFC 3339, or a duration ago such as 2h (default: now)")
	c.Flags().StringVar(&f.reason, "reason", "", "why; for the records, Events and the decision log")
}

func (i *invocation) revokeCommand() *cobra.Command {
	f := &revokeFlags{now: true}
	c := &cobra.Command{
		Use:   "revoke {NODE... | --all} --reason TEXT",
		Short: "Revoke certificates of nodes at once: the API servers refuse their writes",
		Long: `Revoke the certificates of nodes at once: within two seconds the API servers refuse all writes that use such a certificate.
The machines stay trusted: each gets a new certificate by its TPM, without a token. A thief who only has the key does not. It says what it
is going to do, and asks. Then it shows the progress until every node is back.

If all keys may have leaked: revoke --all. To replace certificates without an outage, use rotate.

A node is NotReady until its plugin has looked for announcements (checkInterval, 15 minutes by default) and has enrolled, which takes
seconds. Deleting the NodeRevocation takes nothing back. Use suspend for a machine that is stolen: it gets no new certificate.

What an admission policy cannot refuse: reads, watches that are open, and tokens that the node requested before for its pods.`,
		Example: `  kubectl attest revoke worker-7 --reason="disk was lost" --dry-run
  kubectl attest revoke worker-7 worker-8 --reason="disks were lost"
  kubectl attest revoke --all --reason="a backup with all keys leaked"
  kubectl attest revoke --all --issued-before=2026-11-23T09:00:00Z --reason="an image had keys"`,
		ValidArgsFunction: i.completeNodes,
		RunE:              func(c *cobra.Command, nodes []string) error { return i.revoke(c, nodes, f) },
	}
	f.addSelection(c)
	f.addCommon(c, waitBeyond)
	return c
}

func (i *invocation) rotateCommand() *cobra.Command {
	f := &revokeFlags{}
	c := &cobra.Command{
		Use:   "rotate {NODE... | -l SELECTOR | --all} --reason TEXT",
		Short: "Have nodes renew their certificates, then revoke the old ones: no node becomes NotReady",
		Long: `Have nodes renew their certificates, and revoke each old one once the new one is in use: no node becomes NotReady. A node sees the announcement
at its plugin's next check (checkInterval, 15 minutes by default), and renews at a moment of its own within --spread. What is not renewed
after --limit is revoked all the same. It says what it is going to do, and asks. Then it shows the progress until every node is back.

For a CA rotation: rotate --all, once the controller signs with the new CA. If all keys may have leaked, do not wait: revoke --all.

With --now it is the same as revoke: it revokes at once. A node may then be NotReady for its checkInterval and the enrolment, which takes
seconds. Deleting the NodeRevocation stops what is not revoked yet, and takes nothing back.`,
		Example: `  kubectl attest rotate --all --reason="CA rotation"
  kubectl attest rotate -l pool=gpu --reason="new key type" --spread=1h --limit=6h
  kubectl attest rotate worker-7 --reason="audit finding 12" --wait=false`,
		ValidArgsFunction: i.completeNodes,
		RunE: func(c *cobra.Command, nodes []string) error {
			if f.now && (c.Flags().Changed("spread") || c.Flags().Changed("limit")) {
				return usage(errors.New("--now revokes at once: it does not go with --spread and --limit"))
			}
			if !c.Flags().Changed("timeout") {
				f.timeout = waitBeyond
				if !f.now {
					f.timeout += f.limit
				}
			}
			return i.revoke(c, nodes, f)
		},
	}
	f.addSelection(c)
	c.Flags().StringVarP(&f.selector, "selector", "l", "", "the Nodes with these labels, as for kubectl get")
	c.Flags().DurationVar(&f.spread, "spread", 10*time.Minute, "the time over which the nodes renew")
	c.Flags().DurationVar(&f.limit, "limit", 2*time.Hour, "revoke after this time also what is not renewed")
	c.Flags().BoolVar(&f.now, "now", false, "revoke at once; nodes may be NotReady for their checkInterval (15m by default) and the enrolment")
	f.addCommon(c, 0)
	c.Flags().Lookup("timeout").Usage = "how long to wait; 0 waits without an end (default: one hour after the limit)"
	return c
}

// check checks what needs no API server.
func (f *revokeFlags) check(nodes []string) error {
	given := 0
	for _, set := range []bool{len(nodes) > 0, f.all, f.selector != ""} {
		if set {
			given++
		}
	}
	switch {
	case given == 0:
		return usage(errors.New("name nodes, or say --all"))
	case given > 1:
		return usage(errors.New("nodes, --all and --selector exclude each other"))
	case len(nodes) > maxSelected:
		return tooMany(len(nodes))
	case f.timeout < 0:
		return usage(errors.New("--timeout must not be negative"))
	case f.now:
	case f.spread < 0 || f.spread > maxSpread:
		return usage(fmt.Errorf("--spread must be at most %v", maxSpread))
	case f.limit < time.Second || f.limit > maxLimit:
		return usage(fmt.Errorf("--limit must be from 1s to %v", maxLimit))
	case f.spread >= f.limit:
		return usage(errors.New("--spread must be shorter than --limit: otherwise certificates are revoked whose nodes have not renewed yet"))
	}
	return checkReason(f.reason)
}

func tooMany(n int) error {
	return &failure{codeUsage, "--all selects all nodes of the cluster", fmt.Errorf("%d nodes are selected: at most %d can be named", n, maxSelected)}
}

// issuedBefore parses the flag of that name, nil if it is not set. The API keeps whole seconds: a
// fraction is rounded up, so that it selects no fewer certificates.
func (f *revokeFlags) issuedBefore(now time.Time) (*metav1.Time, error) {
	if f.before == "" {
		return nil, nil
	}
	at, err := time.Parse(time.RFC3339, f.before)
	if err != nil {
		ago, err := time.ParseDuration(f.before)
		if err != nil || ago < 0 {
			return nil, usage(fmt.Errorf("--issued-before %.80q: must be a time as in RFC 3339, such as %s, or a duration ago, such as 2h", f.before, stamp(now)))
		}
		at = now.Add(-ago)
	}
	if at.After(now) {
		return nil, usage(fmt.Errorf("--issued-before %s is in the future: it would revoke what nodes get meanwhile, too", stamp(at)))
	}
	if whole := at.Truncate(time.Second); !whole.Equal(at) {
		at = whole.Add(time.Second)
	}
	return &metav1.Time{Time: at}, nil
}

// plannedNode is a node that a revocation selects.
type plannedNode struct {
	name string
	// certificates are the fingerprints of those that are to be revoked. ends has the end of each.
	certificates []string
	ends         map[string]time.Time
	// ready says that its Node is Ready now. The command does not wait for other nodes.
	ready bool
	// absent says why the node does not come back without help, "" if it does. refused says that
	// the node's requests are denied, too.
	absent  string
	refused bool
}

// revocationPlan is what revoke or rotate is about to do.
type revocationPlan struct {
	object *v1alpha1.NodeRevocation
	nodes  []plannedNode
	// idle are the nodes that have no certificate to revoke. left are selected Nodes without a
	// record.
	idle, left []string
	// certificates is how many are to be revoked, and more how many of the nodes are on no list
	// with a policy yet.
	certificates, more int
	// end is when the last of them ends.
	end time.Time
	// silent are the nodes that do not report their certificate.
	silent  []string
	lists   *Lists
	inForce InForce
}

// planRevocation reads the certificates to revoke.
func (i *invocation) planRevocation(ctx context.Context, a *access, nodes []string, f *revokeFlags) (*revocationPlan, error) {
	before, err := f.issuedBefore(i.now)
	if err != nil {
		return nil, err
	}
	p := &revocationPlan{object: &v1alpha1.NodeRevocation{
		ObjectMeta: a.objectMeta(),
		Spec:       v1alpha1.NodeRevocationSpec{All: f.all, IssuedBefore: before, Mode: v1alpha1.RevokeImmediately, Reason: f.reason},
	}}
	p.object.GenerateName = "revoke-"
	if !f.now {
		p.object.GenerateName, p.object.Spec.Mode = "rotate-", v1alpha1.RevokeAfterRenewal
		p.object.Spec.SpreadSeconds, p.object.Spec.LimitSeconds = new(wholeSeconds(f.spread)), new(wholeSeconds(f.limit))
	}
	suspensions, err := a.readSuspensions(ctx) // first, since its error says if the feature is off
	if err != nil {
		return nil, err
	}
	records, err := a.selectRecords(ctx, p, nodes, f.selector)
	if err != nil {
		return nil, err
	}
	if p.object.Spec.Cluster, err = a.clusterOf(records); err != nil {
		return nil, err
	}
	if p.lists, err = a.readLists(ctx, p.object.Spec.Cluster); err != nil {
		return nil, err
	}
	if err := a.fillPlan(ctx, p, records, suspensions, i.now); err != nil {
		return nil, err
	}
	p.inForce = a.readInForce(ctx, i.now)
	return p, nil
}

// wholeSeconds rounds up. The flags are at most maxLimit.
func wholeSeconds(d time.Duration) int32 {
	return int32(min((d+time.Second-1)/time.Second, math.MaxInt32)) //nolint:gosec // it is bounded
}

// selectRecords returns the records of the selected nodes, and writes the selection into the plan.
func (a *access) selectRecords(ctx context.Context, p *revocationPlan, nodes []string, selector string) ([]v1alpha1.NodeAttestation, error) {
	if selector != "" {
		labelled, err := a.labelledNodes(ctx, selector)
		if err != nil {
			return nil, err
		}
		nodes = labelled
	}
	records, err := a.readRecords(ctx)
	if err != nil || p.object.Spec.All {
		return records, err
	}
	wanted := map[string]bool{}
	for _, name := range nodes {
		wanted[name] = false
	}
	records = slices.DeleteFunc(records, func(r v1alpha1.NodeAttestation) bool {
		if _, ok := wanted[r.Spec.NodeName]; ok {
			wanted[r.Spec.NodeName] = true
			return false
		}
		return true
	})
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		if wanted[name] {
			p.object.Spec.Nodes = append(p.object.Spec.Nodes, name)
		} else {
			p.left = append(p.left, name)
		}
	}
	const hint = "without a record there is nothing to revoke; kubectl attest status lists the nodes that have one"
	switch {
	case selector == "" && len(p.left) > 0:
		return nil, &failure{codeNotFound, hint, fmt.Errorf("these nodes have no record: %s", text.Names(p.left))}
	case len(p.object.Spec.Nodes) == 0:
		return nil, &failure{codeNotFound, hint, fmt.Errorf("no Node with the labels %q has a record", selector)}
	case len(p.object.Spec.Nodes) > maxSelected:
		return nil, tooMany(len(p.object.Spec.Nodes))
	}
	return records, nil
}

// labelledNodes returns the names of the Nodes with these labels.
func (a *access) labelledNodes(ctx context.Context, selector string) (names []string, err error) {
	parsed, err := labels.Parse(selector)
	if err != nil {
		return nil, usage(fmt.Errorf("--selector: %w", err))
	}
	err = readPages(ctx, a.nodes, newNodeList, func(page *metav1.PartialObjectMetadataList) {
		for i := range page.Items {
			names = append(names, page.Items[i].Name)
		}
	}, client.MatchingLabelsSelector{Selector: parsed})
	return names, err
}

// selects reports whether a revocation that is created now selects a certificate.
func (p *revocationPlan) selects(c *v1alpha1.IssuedCertificate, now time.Time) bool {
	if !now.Before(c.NotAfter.Time) {
		return false
	}
	before := p.object.Spec.IssuedBefore
	return before == nil || c.Requested == nil || c.Requested.Before(before)
}

// fillPlan writes into the plan what happens to each node.
func (a *access) fillPlan(ctx context.Context, p *revocationPlan, records []v1alpha1.NodeAttestation, suspensions map[string]*v1alpha1.NodeSuspension, now time.Time) error {
	planned := map[string]*plannedNode{}
	for i := range records {
		r := &records[i]
		n := planned[r.Spec.NodeName]
		if n == nil {
			n = &plannedNode{name: r.Spec.NodeName, ends: map[string]time.Time{}}
			planned[n.name] = n
		}
		for k := range r.Status.Certificates {
			c := &r.Status.Certificates[k]
			if _, listed := p.lists.entries[c.SHA256]; !p.selects(c, now) || listed && c.Revoked {
				continue
			}
			n.certificates = append(n.certificates, c.SHA256)
			n.ends[c.SHA256] = c.NotAfter.Time
			if p.end.Before(c.NotAfter.Time) {
				p.end = c.NotAfter.Time
			}
		}
		switch {
		case r.Spec.EK != nil && suspensions[r.Spec.EK.Fingerprint] != nil:
			n.absent, n.refused = "its machine is suspended", true
		case r.Status.EKReplaced != nil:
			n.absent, n.refused = "its endorsement key was replaced", true
		}
	}
	names := slices.Sorted(maps.Keys(planned))
	states, err := a.readNodes(ctx, names)
	if err != nil {
		return err
	}
	for _, name := range names {
		n := planned[name]
		if len(n.certificates) == 0 {
			p.idle = append(p.idle, name)
			continue
		}
		p.certificates += len(n.certificates)
		if !p.lists.refused[name] {
			p.more++
		}
		state, there := states[name]
		n.ready = state.ready
		switch {
		case n.absent != "":
		case !there:
			n.absent = "there is no Node"
		case !state.ready:
			n.absent = "its Node is not Ready now"
		case !state.reports:
			p.silent = append(p.silent, name)
		}
		p.nodes = append(p.nodes, *n)
	}
	return nil
}

// atOnce reports whether the plan revokes without a renewal.
func (p *revocationPlan) atOnce() bool { return p.object.Spec.Mode == v1alpha1.RevokeImmediately }

// waited returns the nodes that the command waits for: those that are Ready now and come back
// without help.
func (p *revocationPlan) waited() (all []plannedNode) {
	for _, n := range p.nodes {
		if n.ready && n.absent == "" {
			all = append(all, n)
		}
	}
	return all
}

func (p *revocationPlan) names(keep func(plannedNode) bool) (names []string) {
	for _, n := range p.nodes {
		if keep(n) {
			names = append(names, n.name)
		}
	}
	return names
}

// text describes the planned changes.
func (p *revocationPlan) text() string {
	out := &planText{}
	spec := &p.object.Spec
	what := "Revoke at once"
	if !p.atOnce() {
		what = "Renew, then revoke"
	}
	out.line("%s, in cluster %s, reason %q:", what, spec.Cluster, prose(spec.Reason))
	out.addInForce(p.inForce)
	out.item("nodes with certificates to revoke: %s", text.Names(p.names(func(plannedNode) bool { return true })))
	if len(p.idle) > 0 {
		out.item("nodes without such a certificate: %s", text.Names(p.idle))
	}
	if len(p.left) > 0 {
		out.item("left out, since they have no record: %s", text.Names(p.left))
	}
	before := "now"
	if spec.IssuedBefore != nil {
		before = stamp(spec.IssuedBefore.Time)
	}
	out.item("certificates to revoke: %d, requested before %s; the last one ends at %s and stays on its list until then", p.certificates, before, stamp(p.end))
	out.addLists(p.lists, p.more)
	if p.atOnce() {
		out.item("within 2 seconds the API servers refuse their writes; the nodes may still request new certificates with their TPMs")
		out.item("a node is NotReady until its plugin has checked for announcements (checkInterval, %s by default) and has enrolled, which takes seconds", plainDuration(checkInterval))
	} else {
		spread, limit := time.Duration(*spec.SpreadSeconds)*time.Second, time.Duration(*spec.LimitSeconds)*time.Second
		out.item("each node renews at its own time within %s, or at its plugin's next check after that (checkInterval, %s by default)", plainDuration(spread), plainDuration(checkInterval))
		out.item("its old certificates are revoked once the new one is in use, and %s from now at the latest; a node that has not renewed is then NotReady until it renews", plainDuration(limit))
		if limit < spread+checkInterval {
			out.item("WARNING: --limit is shorter than --spread and the default checkInterval together: some nodes may not have renewed by then")
		}
	}
	if back := p.names(func(n plannedNode) bool { return n.absent == "" && !slices.Contains(p.silent, n.name) }); len(back) > 0 {
		out.item("these get a new certificate with their TPM, without a token: %s", text.Names(back))
	}
	var refused, away []string
	for _, n := range p.nodes {
		switch {
		case n.refused:
			refused = append(refused, n.name+" ("+n.absent+")")
		case n.absent != "":
			away = append(away, n.name+" ("+n.absent+")")
		}
	}
	if len(refused) > 0 {
		out.item("these get no new certificate: %s", text.Names(refused))
	}
	if len(away) > 0 {
		out.item("these are not Ready now, and the command does not wait for them: %s", text.Names(away))
	}
	if len(p.silent) > 0 {
		out.item("these do not report their certificate: %s. Their plugins do not check for announcements, or have not done so yet. They come back when their certificates are due", text.Names(p.silent))
	}
	out.addLimits()
	return out.String()
}

// revoke carries out revoke and rotate.
func (i *invocation) revoke(c *cobra.Command, nodes []string, f *revokeFlags) error {
	ctx := c.Context()
	if err := f.check(nodes); err != nil {
		return err
	}
	if _, err := f.issuedBefore(i.now); err != nil {
		return err
	}
	a, err := i.open(ctx)
	if err != nil {
		return err
	}
	plan, err := i.planRevocation(ctx, a, nodes, f)
	if err != nil {
		return err
	}
	if plan.certificates == 0 {
		return &failure{codeNotFound, "kubectl attest describe NODE lists the certificates of a node", errors.New("the selected nodes have no certificate to revoke")}
	}
	if err := i.showPlan(ctx, plan.text(), fmt.Sprintf("Revoke %s of %s?", text.Count(plan.certificates, "certificate"), text.Count(len(plan.nodes), "node")), "nothing was revoked", f); err != nil || f.dryRun {
		return err
	}
	if err := reached(a.records.Create(ctx, plan.object)); err != nil {
		return err
	}
	if err := i.printf("NodeRevocation %s created", plan.object.Name); err != nil {
		return err
	}
	if f.waitFor {
		if err := i.awaitNodes(ctx, a, plan, f.timeout); err != nil {
			return err
		}
	}
	return i.mustBeInForce(ctx, a)
}

// showPlan shows a plan, and asks for a confirmation. With --dry-run the plan is the output.
func (i *invocation) showPlan(ctx context.Context, plan, question, otherwise string, f *revokeFlags) error {
	if f.dryRun {
		_, err := io.WriteString(i.Stdout, plan+"Nothing was changed: --dry-run.\n")
		return err
	}
	if _, err := io.WriteString(i.Stderr, plan); err != nil {
		return err
	}
	return i.confirm(ctx, question, otherwise, f.yes)
}

// mustBeInForce returns an error if revoked certificates are not refused.
func (i *invocation) mustBeInForce(ctx context.Context, a *access) error {
	if f := a.readInForce(ctx, i.now); !f.isTrue() {
		return &failure{codeNotInForce, "kubectl attest check says what can be done", fmt.Errorf("it is recorded, and not in force: the condition %s is %s", telemetry.ConditionRevocation, f)}
	}
	return nil
}
