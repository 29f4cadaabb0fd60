// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

const (
	// suspendTimeout is how long suspend and resume wait by default.
	suspendTimeout = 5 * time.Minute
	// settleTime is the time that API servers may need until a changed policy is in force.
	settleTime = 2 * time.Second
)

var fingerprintPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// suspendFlags are those of suspend and resume.
type suspendFlags struct {
	revokeFlags
	record, ek string
	evict      bool
}

func (i *invocation) suspendCommand() *cobra.Command {
	f := &suspendFlags{}
	c := &cobra.Command{
		Use:   "suspend {NODE | --ek FINGERPRINT [NODE]} --reason TEXT",
		Short: "Deny a machine's requests and refuse its writes until it is resumed; with --evict take its pods and Node away",
		Long: `Suspend a machine until it is resumed: API servers refuse all writes with its certificates, and the controller denies its requests.
A suspension is about the machine's endorsement key (EK). It outlives the record, and holds for each node name that the machine has or
will have. It says what it is going to do, and asks.

What an admission policy cannot refuse: reads, watches that are open, and tokens that the node requested before for its pods. A node may read
the Secrets, ConfigMaps and volumes of the pods that are bound to it. --evict ends that, with your own rights: once the suspension is
in force, it cordons the Node, force-deletes its pods, deletes the Node, and repeats that until no pod is bound. It looks at no
PodDisruptionBudget. Containers go on running on the machine itself. What they could read, change.

If the record is gone, name the fingerprint of the EK with --ek.`,
		Example: `  kubectl attest suspend worker-7 --reason="stolen, ticket 4711" --evict
  kubectl attest suspend --ek=f857ae4ed6e34e33761aea25caaee3fe54a15960fb92dcd63a375ab121deb2a9 --reason="sold"`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: i.completeNode,
		RunE: func(c *cobra.Command, nodes []string) error {
			return i.suspend(c.Context(), strings.Join(nodes, ""), f)
		},
	}
	c.Flags().StringVar(&f.reason, "reason", "", "why; for the records, Events and the decision log")
	c.Flags().StringVar(&f.record, "record", "", "name of the record, if several have the node's name")
	c.Flags().StringVar(&f.ek, "ek", "", "fingerprint of the endorsement key, where no record is left")
	c.Flags().BoolVar(&f.evict, "evict", false, "then force-delete the node's pods, and delete the Node")
	f.addCommon(c, suspendTimeout)
	return c
}

func (i *invocation) resumeCommand() *cobra.Command {
	f := &suspendFlags{}
	c := &cobra.Command{
		Use:   "resume {NODE | --ek FINGERPRINT}",
		Short: "End the suspension of a machine",
		Long: `End the suspension of a machine. Its old certificates stay revoked. With one that has not ended the machine may ask for a new one, by its
TPM. Otherwise it needs a bootstrap credential. It says what it is going to do, and asks.

The suspension is found by the EK in the node's record, by the node's name at the time of the suspension, or by --ek.`,
		Example: `  kubectl attest resume worker-7
  kubectl attest resume --ek=f857ae4ed6e34e33761aea25caaee3fe54a15960fb92dcd63a375ab121deb2a9`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: i.completeNode,
		RunE:              func(c *cobra.Command, nodes []string) error { return i.resume(c.Context(), strings.Join(nodes, ""), f) },
	}
	c.Flags().StringVar(&f.ek, "ek", "", "fingerprint of the endorsement key")
	f.addCommon(c, suspendTimeout)
	return c
}

// check checks what needs no API server.
func (f *suspendFlags) check(node string) error {
	f.ek = strings.ToLower(f.ek)
	switch {
	case node == "" && f.ek == "":
		return usage(errors.New("name a node, or say --ek"))
	case f.ek != "" && !fingerprintPattern.MatchString(f.ek):
		return usage(errors.New("--ek must be the fingerprint of an endorsement key: 64 hex digits"))
	case f.ek != "" && f.record != "":
		return usage(errors.New("--ek and --record exclude each other"))
	case f.evict && node == "":
		return usage(errors.New("--evict needs the node's name"))
	case f.timeout < 0:
		return usage(errors.New("--timeout must not be negative"))
	case f.evict && !f.waitFor:
		return usage(errors.New("--evict waits until the suspension is in force: it does not go with --wait=false"))
	}
	return nil
}

// suspensionPlan is what suspend or resume is about to do.
type suspensionPlan struct {
	object *v1alpha1.NodeSuspension
	// existing is the suspension that is there, nil if there is none.
	existing *v1alpha1.NodeSuspension
	machine  string
	// records are those of the endorsement key, in all clusters of the namespace.
	records []v1alpha1.NodeAttestation
	// certificates has, by fingerprint, the ends of the certificates that have not expired. more is
	// how many of their nodes are on no list with a policy yet. end is the end of the last one.
	certificates map[string]time.Time
	more         int
	end          time.Time
	lists        *Lists
	inForce      InForce
	eviction     *eviction
}

func (p *suspensionPlan) ek() string { return p.object.Spec.EK }

// recordOf returns the record of a node, nil if there is none.
func (a *access) recordOf(ctx context.Context, node, record string) (*v1alpha1.NodeAttestation, error) {
	if node == "" {
		return nil, nil
	}
	records, err := a.readRecords(ctx, client.MatchingFields{v1alpha1.FieldNodeName: node})
	if err != nil {
		return nil, err
	}
	return oneRecord(records, node, record)
}

// planSuspension reads the machines to suspend.
func (i *invocation) planSuspension(ctx context.Context, a *access, node string, f *suspendFlags) (*suspensionPlan, error) {
	suspensions, err := a.readSuspensions(ctx)
	if err != nil {
		return nil, err
	}
	record, err := a.recordOf(ctx, node, f.record)
	if err != nil {
		return nil, err
	}
	ek, own := f.ek, ""
	if record != nil && record.Spec.EK != nil {
		own = record.Spec.EK.Fingerprint
	}
	switch {
	case ek != "" && record != nil && own != ek:
		return nil, usage(fmt.Errorf("the record of node %q has another endorsement key: %s", node, own))
	case ek != "":
	case record == nil:
		return nil, &failure{codeNotFound, "name the fingerprint of its endorsement key with --ek; kubelet-authenticator identify prints it on the machine", fmt.Errorf("node %q has no record", node)}
	case own == "":
		return nil, usage(fmt.Errorf("the record of node %q has no endorsement key: its certificates can be revoked, and the machine cannot be suspended", node))
	default:
		ek = own
	}
	p := &suspensionPlan{existing: suspensions[ek], object: &v1alpha1.NodeSuspension{
		ObjectMeta: a.objectMeta(), Spec: v1alpha1.NodeSuspensionSpec{EK: ek, NodeName: node, Reason: f.reason},
	}}
	p.object.Name = "ek-" + ek
	if err := i.fillSuspension(ctx, a, p); err != nil {
		return nil, err
	}
	// for people, and for the policy about tokens of its pods
	if node == "" && len(p.records) == 1 {
		p.object.Spec.NodeName = p.records[0].Spec.NodeName
	}
	if f.evict {
		if p.eviction, err = a.planEviction(ctx, node); err != nil {
			return nil, err
		}
	}
	p.inForce = a.readInForce(ctx, i.now)
	return p, nil
}

// fillSuspension reads the records and certificates of the endorsement key.
func (i *invocation) fillSuspension(ctx context.Context, a *access, p *suspensionPlan) error {
	records, err := a.readRecords(ctx)
	if err != nil {
		return err
	}
	if p.lists, err = a.listsOf(ctx, records); err != nil {
		return err
	}
	p.certificates = map[string]time.Time{}
	unlisted := map[string]bool{}
	add := func(node, sum string, end time.Time) {
		if _, known := p.certificates[sum]; known || !i.now.Before(end) {
			return
		}
		p.certificates[sum] = end
		if !p.lists.refused[node] {
			unlisted[node] = true
		}
		if p.end.Before(end) {
			p.end = end
		}
	}
	for k := range records {
		r := &records[k]
		if r.Spec.EK == nil || r.Spec.EK.Fingerprint != p.ek() {
			continue
		}
		p.records, p.machine = append(p.records, *r), r.Spec.Machine.Name
		for _, c := range r.Status.Certificates {
			if !c.FormerEK {
				add(r.Spec.NodeName, c.SHA256, c.NotAfter.Time)
			}
		}
	}
	for sum, c := range p.lists.entries {
		if c.EK == p.ek() {
			add(c.NodeName, sum, c.NotAfter.Time)
		}
	}
	p.more = len(unlisted)
	return nil
}

// listsOf reads the lists of the records' clusters. Usually that is one.
func (a *access) listsOf(ctx context.Context, records []v1alpha1.NodeAttestation) (*Lists, error) {
	cluster, err := a.clusterOf(records)
	if err != nil {
		cluster = "" // no record is left, or several clusters share a namespace
	}
	return a.readLists(ctx, cluster)
}

// text describes the planned changes.
func (p *suspensionPlan) text() string {
	out := &planText{}
	machine := "with endorsement key " + p.ek()
	if p.machine != "" {
		machine = p.machine + " " + machine
	}
	out.line("Suspend machine %s, reason %q:", machine, prose(p.object.Spec.Reason))
	out.addInForce(p.inForce)
	if p.existing != nil {
		out.item("it is suspended already, since %s, reason %q: that stays as it is", stamp(p.existing.CreationTimestamp.Time), prose(p.existing.Spec.Reason))
	}
	out.item("the controller denies all its requests until kubectl attest resume, under each node name, whatever happens to its records")
	if len(p.records) == 0 {
		out.item("no record has this endorsement key")
	}
	for _, r := range p.records[:min(len(p.records), text.MaxNames)] {
		out.item("record %s/%s, node %s", r.Namespace, r.Name, r.Spec.NodeName)
	}
	if len(p.certificates) > 0 {
		out.item("API servers refuse all writes with its certificates (%d); the last one ends at %s and stays on its list until then", len(p.certificates), stamp(p.end))
		out.addLists(p.lists, p.more)
	} else {
		out.item("no certificate of it is known that has not ended")
	}
	out.item("its node becomes NotReady, and stays NotReady until you resume the machine")
	out.addLimits()
	if p.eviction == nil {
		out.item("it may still read the Secrets, ConfigMaps and volumes of the pods that are bound to it: --evict ends that")
	} else {
		p.eviction.describe(out)
	}
	return out.String()
}

// suspend carries out the command.
func (i *invocation) suspend(ctx context.Context, node string, f *suspendFlags) error {
	if err := f.check(node); err != nil {
		return err
	}
	if err := checkReason(f.reason); err != nil {
		return err
	}
	a, err := i.open(ctx)
	if err != nil {
		return err
	}
	p, err := i.planSuspension(ctx, a, node, f)
	if err != nil {
		return err
	}
	question := "Suspend the machine?"
	if f.evict {
		question = sprintf("Suspend the machine, and evict node %s?", node)
	}
	f.yes = f.yes || p.existing != nil && !f.evict // then the command only waits
	if err := i.showPlan(ctx, p.text(), question, "nothing was changed", &f.revokeFlags); err != nil || f.dryRun {
		return err
	}
	if p.existing == nil {
		if err := reached(a.records.Create(ctx, p.object)); err != nil {
			return err
		}
		if err := i.printf("NodeSuspension %s created", p.object.Name); err != nil {
			return err
		}
	}
	begin := time.Now()
	if f.waitFor {
		if err := i.awaitSuspension(ctx, a, p, f.timeout); err != nil {
			return err
		}
	}
	if err := i.mustBeInForce(ctx, a); err != nil {
		return err
	}
	if !f.evict {
		return nil
	}
	left := f.timeout
	if f.timeout > 0 {
		left = max(time.Second, f.timeout-time.Since(begin))
	}
	return i.evict(ctx, a, p.eviction, left)
}

// awaitSuspension waits until the API servers refuse the machine's certificates.
func (i *invocation) awaitSuspension(ctx context.Context, a *access, p *suspensionPlan, timeout time.Duration) error {
	err := i.poll(ctx, timeout, lastPoll, func(ctx context.Context) (bool, string, error) {
		object := &v1alpha1.NodeSuspension{}
		if err := a.records.Get(ctx, client.ObjectKeyFromObject(p.object), object); apierrors.IsNotFound(err) {
			return false, "", stop{&failure{codeNotFound, "", fmt.Errorf("the NodeSuspension %s was deleted", p.object.Name)}}
		} else if err != nil {
			return false, "", reached(err)
		}
		open, err := a.notSuspended(ctx, p, i.clock())
		if err != nil {
			return false, "", err
		}
		if len(open) > 0 {
			return false, "waiting until the suspension is in force: " + text.Names(open), nil
		}
		return true, "", nil
	})
	if errors.Is(err, errWaitEnded) {
		return waitEnded(ctx, timeout, "is the controller running? kubectl attest check", "the suspension is recorded, and it is not known to be in force; nothing was evicted")
	} else if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return waitEnded(ctx, timeout, "", "the suspension stays")
	case <-time.After(settleTime):
	}
	return i.printf("%s of the machine suspended", text.Count(len(p.certificates), "certificate"))
}

// notSuspended returns what the controller has not done yet: records without the condition, and
// certificates of the machine that no list has as suspended.
func (a *access) notSuspended(ctx context.Context, p *suspensionPlan, now time.Time) (open []string, err error) {
	records, err := a.readRecords(ctx)
	if err != nil {
		return nil, err
	}
	lists, err := a.listsOf(ctx, records)
	if err != nil {
		return nil, err
	}
	for i := range records {
		r := &records[i]
		if r.Spec.EK != nil && r.Spec.EK.Fingerprint == p.ek() && !meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionSuspended) {
			open = append(open, "record "+r.Name)
		}
	}
	for _, sum := range slices.Sorted(maps.Keys(p.certificates)) {
		if entry, listed := lists.entries[sum]; now.Before(p.certificates[sum]) && (!listed || !entry.Suspended) {
			open = append(open, "certificate "+short(sum))
		}
	}
	return open, nil
}

// planResumption finds the suspension that is to end.
func (i *invocation) planResumption(ctx context.Context, a *access, node string, f *suspendFlags) (*suspensionPlan, error) {
	suspensions, err := a.readSuspensions(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]*v1alpha1.NodeSuspension{}
	if f.ek != "" {
		if s := suspensions[f.ek]; s != nil {
			found[f.ek] = s
		}
	} else {
		records, err := a.readRecords(ctx, client.MatchingFields{v1alpha1.FieldNodeName: node})
		if err != nil {
			return nil, err
		}
		for k := range records {
			if ek := records[k].Spec.EK; ek != nil && suspensions[ek.Fingerprint] != nil {
				found[ek.Fingerprint] = suspensions[ek.Fingerprint]
			}
		}
		for ek, s := range suspensions {
			if s.Spec.NodeName == node {
				found[ek] = s
			}
		}
	}
	var eks []string
	p := &suspensionPlan{}
	for ek, s := range found {
		eks, p.existing, p.object = append(eks, ek), s, s
	}
	slices.Sort(eks)
	switch {
	case len(eks) == 0:
		return nil, &failure{codeNotFound, "kubectl attest revocations lists all suspensions", errors.New("no suspension is found")}
	case len(eks) > 1:
		return nil, usage(fmt.Errorf("several suspensions are of node %q: name one of them with --ek: %s", node, text.Names(eks)))
	}
	return p, i.fillSuspension(ctx, a, p)
}

// resumptionText describes the planned changes, and what the machine needs.
func (p *suspensionPlan) resumptionText() string {
	out := &planText{}
	out.line("Resume the machine with endorsement key %s:", p.ek())
	out.item("it is suspended since %s, reason %q", stamp(p.existing.CreationTimestamp.Time), prose(p.existing.Spec.Reason))
	out.item("the controller decides on its requests again, by evidence")
	switch {
	case len(p.certificates) > 0 && len(p.records) > 0:
		out.item("its old certificates (%d) stay revoked; until %s the machine may request a new one with them, without a bootstrap credential", len(p.certificates), stamp(p.end))
		out.item("if it has lost them, it needs a bootstrap credential")
	case len(p.records) > 0:
		out.item("its old certificates have ended: it needs a bootstrap credential")
	default:
		out.item("it has no record: it enrols as a new machine, with a bootstrap credential, once a source of machines names it and no Node has its name")
	}
	return out.String()
}

// resume carries out the command.
func (i *invocation) resume(ctx context.Context, node string, f *suspendFlags) error {
	if err := f.check(node); err != nil {
		return err
	}
	if f.ek != "" && node != "" {
		return usage(errors.New("NODE and --ek exclude each other"))
	}
	a, err := i.open(ctx)
	if err != nil {
		return err
	}
	p, err := i.planResumption(ctx, a, node, f)
	if err != nil {
		return err
	}
	if err := i.showPlan(ctx, p.resumptionText(), "Resume the machine?", "nothing was changed", &f.revokeFlags); err != nil || f.dryRun {
		return err
	}
	uid := p.existing.UID
	switch err := reached(a.records.Delete(ctx, p.existing, client.Preconditions{UID: &uid})); {
	case apierrors.IsNotFound(err):
		return &failure{codeNotFound, "", fmt.Errorf("NodeSuspension %s is gone already", p.existing.Name)}
	case err != nil:
		return err
	}
	if err := i.printf("NodeSuspension %s deleted", p.existing.Name); err != nil || !f.waitFor {
		return err
	}
	err = i.poll(ctx, f.timeout, lastPoll, func(ctx context.Context) (bool, string, error) {
		records, err := a.readRecords(ctx)
		if err != nil {
			return false, "", err
		}
		for k := range records {
			if r := &records[k]; r.Spec.EK != nil && r.Spec.EK.Fingerprint == p.ek() && meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionSuspended) {
				return false, sprintf("waiting for the controller: record %s still says Suspended", r.Name), nil
			}
		}
		return true, "the machine may attest again; kubectl attest describe shows when it has", nil
	})
	if errors.Is(err, errWaitEnded) {
		return waitEnded(ctx, f.timeout, "is the controller running? kubectl attest check", "the suspension is deleted, and the controller has not said so in the record")
	}
	return err
}
