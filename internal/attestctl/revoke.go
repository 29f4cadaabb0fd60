// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

const (
	// maxSelected is how many nodes a NodeRevocation names at most, by its CRD.
	maxSelected = 1000
	// The limits of the CRD.
	maxSpread = 7 * 24 * time.Hour
	maxLimit  = 30 * 24 * time.Hour
	// waitBeyond is how long a command waits by default, after the last certificate is revoked.
	waitBeyond = time.Hour
	// checkInterval is the plugin's default for its setting of that name.
	checkInterval = 15 * time.Minute
	// lastPollMany is the longest pause between two polls for more than manyNodes nodes, since each
	// poll then reads all Nodes.
	lastPollMany = 10 * time.Second
)

// revokeFlags are those of revoke and rotate.
type revokeFlags struct {
	changeFlags
	all, now         bool
	selector, before string
	reason           string
	spread, limit    time.Duration
}

func (f *revokeFlags) addSelection(c *cobra.Command) {
	c.Flags().BoolVar(&f.all, "all", false, "all nodes of the cluster that have a record")
	c.Flags().StringVar(&f.before, "issued-before", "", "only certificates requested before this time: RFC 3339, or a duration ago such as 2h (default: now)")
	addReason(c, &f.reason)
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
		RunE:              func(c *cobra.Command, nodes []string) error { return i.revoke(c.Context(), nodes, f) },
	}
	f.addSelection(c)
	f.add(c, waitBeyond)
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
				return cli.Usage(errors.New("--now revokes at once: it does not go with --spread and --limit"))
			}
			if !c.Flags().Changed("timeout") {
				f.timeout = waitBeyond
				if !f.now {
					f.timeout += f.limit
				}
			}
			return i.revoke(c.Context(), nodes, f)
		},
	}
	f.addSelection(c)
	c.Flags().StringVarP(&f.selector, "selector", "l", "", "the Nodes with these labels, as for kubectl get")
	c.Flags().DurationVar(&f.spread, "spread", 10*time.Minute, "the time over which the nodes renew")
	c.Flags().DurationVar(&f.limit, "limit", 2*time.Hour, "revoke after this time also what is not renewed")
	c.Flags().BoolVar(&f.now, "now", false, "revoke at once; nodes may be NotReady for their checkInterval (15m by default) and the enrolment")
	f.add(c, 0)
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
		return cli.Usage(errors.New("name nodes, or say --all"))
	case given > 1:
		return cli.Usage(errors.New("nodes, --all and --selector exclude each other"))
	case len(nodes) > maxSelected:
		return tooMany(len(nodes))
	case f.now:
	case f.spread < 0 || f.spread > maxSpread:
		return cli.Usage(fmt.Errorf("--spread must be at most %v", maxSpread))
	case f.limit < time.Second || f.limit > maxLimit:
		return cli.Usage(fmt.Errorf("--limit must be from 1s to %v", maxLimit))
	case f.spread >= f.limit:
		return cli.Usage(errors.New("--spread must be shorter than --limit: otherwise certificates are revoked whose nodes have not renewed yet"))
	}
	return checkReason(f.reason)
}

func tooMany(n int) error {
	return cli.Fail(codeUsage, "--all selects all nodes of the cluster", fmt.Errorf("%d nodes are selected: at most %d can be named", n, maxSelected))
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
			return nil, cli.Usage(fmt.Errorf("--issued-before %.80q: must be a time as in RFC 3339, such as %s, or a duration ago, such as 2h", f.before, stamp(now)))
		}
		at = now.Add(-ago)
	}
	if at.After(now) {
		return nil, cli.Usage(fmt.Errorf("--issued-before %s is in the future: it would revoke what nodes get meanwhile, too", stamp(at)))
	}
	if whole := at.Truncate(time.Second); !whole.Equal(at) {
		at = whole.Add(time.Second)
	}
	return &metav1.Time{Time: at}, nil
}

// wholeSeconds rounds up. The flags are at most maxLimit.
func wholeSeconds(d time.Duration) int32 {
	return int32(min((d+time.Second-1)/time.Second, math.MaxInt32)) //nolint:gosec // it is bounded
}

// revoke carries out revoke and rotate.
func (i *invocation) revoke(ctx context.Context, nodes []string, f *revokeFlags) error {
	if err := f.check(nodes); err != nil {
		return err
	}
	before, err := f.issuedBefore(i.now)
	if err != nil {
		return err
	}
	return i.change(ctx, &f.changeFlags, func(ctx context.Context, a *access) (*plan, error) {
		s := &selection{object: &v1alpha1.NodeRevocation{
			ObjectMeta: a.objectMeta(),
			Spec:       v1alpha1.NodeRevocationSpec{All: f.all, IssuedBefore: before, Mode: v1alpha1.RevokeImmediately, Reason: f.reason},
		}}
		s.object.GenerateName = "revoke-"
		if !f.now {
			s.object.GenerateName, s.object.Spec.Mode = "rotate-", v1alpha1.RevokeAfterRenewal
			s.object.Spec.SpreadSeconds, s.object.Spec.LimitSeconds = new(wholeSeconds(f.spread)), new(wholeSeconds(f.limit))
		}
		if err := s.read(ctx, a, nodes, f.selector, i.now); err != nil {
			return nil, err
		}
		if s.certificates == 0 {
			return nil, cli.Fail(codeNotFound, "kubectl attest describe NODE lists the certificates of a node", errors.New("the selected nodes have no certificate to revoke"))
		}
		p := &plan{
			question:  fmt.Sprintf("Revoke %s of %s?", text.Count(s.certificates, "certificate"), text.Count(len(s.nodes), "node")),
			otherwise: "nothing was revoked",
			stages:    []stage{{writes: []write{creation(a.records, "NodeRevocation", s.object)}, wait: s.wait(i, a), mustBeInForce: true}},
		}
		s.describe(&p.text, a.readInForce(ctx, i.now))
		return p, nil
	})
}

// selection is what a new NodeRevocation selects.
type selection struct {
	object *v1alpha1.NodeRevocation
	// nodes have certificates to revoke. idle have none. left are selected Nodes without a record.
	nodes      []selectedNode
	idle, left []string
	// certificates is how many are to be revoked. lastEnd is when the last of them ends. unlisted
	// is how many of the nodes are on no list with a policy yet.
	certificates, unlisted int
	lastEnd                time.Time
	lists                  *Lists
}

// selectedNode is a node with certificates to revoke.
type selectedNode struct {
	name string
	// certificates has the ends of those that are to be revoked, by fingerprint.
	certificates map[string]time.Time
	// absent says why the node does not come back without help, or is not Ready now. It is empty if
	// the command waits for the node. refused says that the node's requests are denied.
	absent  string
	refused bool
	// silent says that the node does not report its certificate.
	silent bool
}

// atOnce reports whether certificates are revoked without a renewal.
func (s *selection) atOnce() bool { return s.object.Spec.Mode == v1alpha1.RevokeImmediately }

// names returns the names of the nodes to keep, all of them if keep is nil.
func (s *selection) names(keep func(*selectedNode) bool) (names []string) {
	for k := range s.nodes {
		if keep == nil || keep(&s.nodes[k]) {
			names = append(names, s.nodes[k].name)
		}
	}
	return names
}

func isAwaited(n *selectedNode) bool { return n.absent == "" }

// read finds out what is selected, and writes the selection into the object.
func (s *selection) read(ctx context.Context, a *access, names []string, selector string, now time.Time) error {
	suspensions, err := a.readSuspensions(ctx) // first, since its error says if the feature is off
	if err != nil {
		return err
	}
	records, err := s.selectRecords(ctx, a, names, selector)
	if err != nil {
		return err
	}
	if s.object.Spec.Cluster, err = a.clusterOf(records); err != nil {
		return err
	}
	if s.lists, err = a.readLists(ctx, s.object.Spec.Cluster); err != nil {
		return err
	}
	selected := map[string]*selectedNode{}
	for i := range records {
		r := &records[i]
		n := selected[r.Spec.NodeName]
		if n == nil {
			n = &selectedNode{name: r.Spec.NodeName, certificates: map[string]time.Time{}}
			selected[n.name] = n
		}
		for k := range r.Status.Certificates {
			c := &r.Status.Certificates[k]
			if _, listed := s.lists.entries[c.SHA256]; s.selects(c, now) && (!listed || !c.Revoked) {
				n.certificates[c.SHA256] = c.NotAfter.Time
			}
		}
		switch {
		case r.Spec.EK != nil && suspensions[r.Spec.EK.Fingerprint] != nil:
			n.absent, n.refused = "its machine is suspended", true
		case r.Status.EKReplaced != nil:
			n.absent, n.refused = "its endorsement key was replaced", true
		}
	}
	all := slices.Sorted(maps.Keys(selected))
	states, err := a.readNodes(ctx, all)
	if err != nil {
		return err
	}
	for _, name := range all {
		n := selected[name]
		if len(n.certificates) == 0 {
			s.idle = append(s.idle, name)
			continue
		}
		s.certificates += len(n.certificates)
		for _, end := range n.certificates {
			if s.lastEnd.Before(end) {
				s.lastEnd = end
			}
		}
		if !s.lists.refused[name] {
			s.unlisted++
		}
		switch state, there := states[name]; {
		case n.absent != "":
		case !there:
			n.absent = "there is no Node"
		case !state.ready:
			n.absent = "its Node is not Ready now"
		default:
			n.silent = !state.reports
		}
		s.nodes = append(s.nodes, *n)
	}
	return nil
}

// selectRecords returns the records of the selected nodes, and writes their names into the object.
func (s *selection) selectRecords(ctx context.Context, a *access, names []string, selector string) ([]v1alpha1.NodeAttestation, error) {
	if selector != "" {
		labelled, err := a.labelledNodes(ctx, selector)
		if err != nil {
			return nil, err
		}
		names = labelled
	}
	records, err := a.readRecords(ctx)
	if err != nil || s.object.Spec.All {
		return records, err
	}
	recorded := map[string]bool{} // by each selected name
	for _, name := range names {
		recorded[name] = false
	}
	records = slices.DeleteFunc(records, func(r v1alpha1.NodeAttestation) bool {
		_, selected := recorded[r.Spec.NodeName]
		if selected {
			recorded[r.Spec.NodeName] = true
		}
		return !selected
	})
	for _, name := range slices.Sorted(maps.Keys(recorded)) {
		if recorded[name] {
			s.object.Spec.Nodes = append(s.object.Spec.Nodes, name)
		} else {
			s.left = append(s.left, name)
		}
	}
	const hint = "without a record there is nothing to revoke; kubectl attest status lists the nodes that have one"
	switch {
	case selector == "" && len(s.left) > 0:
		return nil, cli.Fail(codeNotFound, hint, fmt.Errorf("these nodes have no record: %s", text.Names(s.left)))
	case len(s.object.Spec.Nodes) == 0:
		return nil, cli.Fail(codeNotFound, hint, fmt.Errorf("no Node with the labels %q has a record", selector))
	case len(s.object.Spec.Nodes) > maxSelected:
		return nil, tooMany(len(s.object.Spec.Nodes))
	}
	return records, nil
}

// selects reports whether a revocation that is created now selects a certificate.
func (s *selection) selects(c *v1alpha1.IssuedCertificate, now time.Time) bool {
	before := s.object.Spec.IssuedBefore
	return now.Before(c.NotAfter.Time) && (before == nil || c.Requested == nil || c.Requested.Before(before))
}

// describe says what happens to each node.
func (s *selection) describe(out *planText, inForce InForce) {
	spec := &s.object.Spec
	what := "Revoke at once"
	if !s.atOnce() {
		what = "Renew, then revoke"
	}
	out.line("%s, in cluster %s, reason %q:", what, spec.Cluster, prose(spec.Reason))
	out.addInForce(inForce)
	out.item("nodes with certificates to revoke: %s", text.Names(s.names(nil)))
	if len(s.idle) > 0 {
		out.item("nodes without such a certificate: %s", text.Names(s.idle))
	}
	if len(s.left) > 0 {
		out.item("left out, since they have no record: %s", text.Names(s.left))
	}
	before := "now"
	if spec.IssuedBefore != nil {
		before = stamp(spec.IssuedBefore.Time)
	}
	out.item("certificates to revoke: %d, requested before %s; the last one ends at %s and stays on its list until then", s.certificates, before, stamp(s.lastEnd))
	out.addLists(s.lists, s.unlisted)
	if s.atOnce() {
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
	if back := s.names(func(n *selectedNode) bool { return isAwaited(n) && !n.silent }); len(back) > 0 {
		out.item("these get a new certificate with their TPM, without a token: %s", text.Names(back))
	}
	var refused, away []string
	for _, n := range s.nodes {
		switch because := n.name + " (" + n.absent + ")"; {
		case n.refused:
			refused = append(refused, because)
		case n.absent != "":
			away = append(away, because)
		}
	}
	if len(refused) > 0 {
		out.item("these get no new certificate: %s", text.Names(refused))
	}
	if len(away) > 0 {
		out.item("these are not Ready now, and the command does not wait for them: %s", text.Names(away))
	}
	if silent := s.names(func(n *selectedNode) bool { return n.silent }); len(silent) > 0 {
		out.item("these do not report their certificate: %s. Their plugins do not check for announcements, or have not done so yet. They come back when their certificates are due", text.Names(silent))
	}
	out.addLimits()
}

// revocationProgress is how far a revocation has come.
type revocationProgress struct {
	revoked, back int
	// waiting are the nodes that the command waits for. gone are nodes whose records were deleted:
	// nothing says when they are back.
	waiting, gone []string
	// lost are nodes whose records were deleted: the controller does not know some of their
	// certificates, so it does not revoke them. lostCertificates is how many these are.
	lost             []string
	lostCertificates int
}

// wait waits until each node that is Ready now is back, and until all certificates are revoked that
// are revoked at once.
func (s *selection) wait(i *invocation, a *access) *wait {
	var last revocationProgress
	awaited := len(s.names(isAwaited))
	w := &wait{
		begins: fmt.Sprintf("waiting for the revocation, and for %s to come back; Ctrl-C ends the wait, not the revocation", text.Count(awaited, "node")),
		look: func(ctx context.Context) (bool, string, error) {
			at, err := s.progress(ctx, a, i.clock())
			if err != nil {
				return false, "", err
			}
			// The controller may move a certificate to another list while the lists are read. So
			// two looks must agree before a certificate counts as not revoked.
			if at.lostCertificates != last.lostCertificates || !slices.Equal(at.lost, last.lost) {
				at.waiting = append(at.waiting, at.lost...)
			}
			last = at
			progress := fmt.Sprintf("%d of %d certificates revoked, %d of %d nodes back", at.revoked, s.certificates, at.back, awaited)
			if len(at.waiting) > 0 {
				progress += "; waiting for " + text.Names(at.waiting)
			}
			return len(at.waiting) == 0, progress, nil
		},
		finish: func(took time.Duration) error {
			line := fmt.Sprintf("%s revoked, %s back after %s", text.Count(last.revoked, "certificate"), text.Count(last.back, "node"), took.Round(time.Second))
			if len(last.gone) > 0 {
				line += "; their records were deleted meanwhile: " + text.Names(last.gone)
			}
			if err := i.printf("%s", line); err != nil || len(last.lost) == 0 {
				return err
			}
			return cli.Fail(codeNotInForce, "once these nodes have records again, run the command again",
				fmt.Errorf("NOT revoked: %s, whose records were deleted meanwhile; nodes: %s", text.Count(last.lostCertificates, "certificate"), text.Names(last.lost)))

		},
		ended: func() string {
			return fmt.Sprintf("the revocation %s goes on; %d of %d nodes are back, waiting for %s", s.object.Name, last.back, awaited, text.Names(last.waiting))
		},
		hint: "look again: kubectl attest revocations, and kubectl attest describe NODE",
	}
	if len(s.nodes) > manyNodes {
		w.longest = lastPollMany
	}
	return w
}

// progress reads from the status of the revocation which nodes have a newer certificate, and from
// the Nodes whether they are Ready. The status has one number for all revoked certificates, also
// those that were revoked before. So the lists say what is refused.
func (s *selection) progress(ctx context.Context, a *access, now time.Time) (at revocationProgress, err error) {
	object := &v1alpha1.NodeRevocation{}
	if err := a.records.Get(ctx, client.ObjectKeyFromObject(s.object), object); apierrors.IsNotFound(err) {
		return at, stop{cli.Fail(codeNotFound, "what is revoked stays revoked", fmt.Errorf("the NodeRevocation %s was deleted: the rest is not revoked", s.object.Name))}
	} else if err != nil {
		return at, reached(err)
	}
	// The controller writes the lists before the status. Read in this order, they are not older.
	lists, err := a.readLists(ctx, s.object.Spec.Cluster)
	if err != nil {
		return at, err
	}
	status := &object.Status
	// missing until the controller has listed what is revoked at once
	complete := meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionComplete)
	// no more certificates are going to be revoked
	final := complete != nil && (s.atOnce() || complete.Status == metav1.ConditionTrue)
	var unnamed []string // the awaited nodes that the status does not name
	for k := range s.nodes {
		n, left := &s.nodes[k], 0
		for sum, end := range n.certificates {
			if _, listed := lists.entries[sum]; listed || !now.Before(end) {
				at.revoked++
			} else {
				left++
			}
		}
		switch {
		case left > 0 && final:
			at.lost, at.lostCertificates = append(at.lost, n.name), at.lostCertificates+left
		case left > 0 && s.atOnce():
			at.waiting = append(at.waiting, n.name)
		case !isAwaited(n):
		case left > 0 || complete == nil || slices.Contains(status.Waiting, n.name):
			at.waiting = append(at.waiting, n.name)
		default:
			unnamed = append(unnamed, n.name)
		}
	}
	records, err := a.recordsOf(ctx, unnamed)
	if err != nil {
		return at, err
	}
	nodes, err := a.readNodes(ctx, unnamed)
	if err != nil {
		return at, err
	}
	// The status names the first 16 nodes without a newer certificate. If there are more, the
	// records say which nodes have one, by the controller's rule.
	namesAll := int(status.Nodes-status.Renewed) <= len(status.Waiting)
	isSelected := func(c v1alpha1.IssuedCertificate) bool { return object.Selects(&c) }
	isNewer := func(c v1alpha1.IssuedCertificate) bool { return !c.FormerEK && !object.Selects(&c) }
	lacksNewer := func(r v1alpha1.NodeAttestation) bool {
		return slices.ContainsFunc(r.Status.Certificates, isSelected) && !slices.ContainsFunc(r.Status.Certificates, isNewer)
	}
	for _, name := range unnamed {
		switch {
		case len(records[name]) == 0:
			at.gone = append(at.gone, name)
		case nodes[name].ready && (namesAll || !slices.ContainsFunc(records[name], lacksNewer)):
			at.back++
		default:
			at.waiting = append(at.waiting, name)
		}
	}
	slices.Sort(at.waiting)
	slices.Sort(at.gone)
	return at, nil
}
