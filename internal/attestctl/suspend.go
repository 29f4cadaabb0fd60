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

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
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
	changeFlags
	reason, record, ek string
	evict              bool
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
	addReason(c, &f.reason)
	c.Flags().StringVar(&f.record, "record", "", "name of the record, if several have the node's name")
	c.Flags().StringVar(&f.ek, "ek", "", "fingerprint of the endorsement key, where no record is left")
	c.Flags().BoolVar(&f.evict, "evict", false, "then force-delete the node's pods, and delete the Node")
	f.add(c, suspendTimeout)
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
	f.add(c, suspendTimeout)
	return c
}

// check checks what needs no API server.
func (f *suspendFlags) check(node string) error {
	f.ek = strings.ToLower(f.ek)
	switch {
	case node == "" && f.ek == "":
		return cli.Usage(errors.New("name a node, or say --ek"))
	case f.ek != "" && !fingerprintPattern.MatchString(f.ek):
		return cli.Usage(errors.New("--ek must be the fingerprint of an endorsement key: 64 hex digits"))
	case f.ek != "" && f.record != "":
		return cli.Usage(errors.New("--ek and --record exclude each other"))
	case f.evict && node == "":
		return cli.Usage(errors.New("--evict needs the node's name"))
	case f.evict && !f.wait:
		return cli.Usage(errors.New("--evict waits until the suspension is in force: it does not go with --wait=false"))
	}
	return nil
}

// machine is the machine that a command suspends or resumes.
type machine struct {
	// ek is the fingerprint of its endorsement key. name is empty if no record has the key.
	ek, name string
	// records are those of the endorsement key, in all clusters of the namespace.
	records []v1alpha1.NodeAttestation
	// certificates has, by fingerprint, the ends of the certificates that have not expired.
	// unlisted is how many of their nodes are on no list with a policy yet. lastEnd is the end of
	// the last certificate.
	certificates map[string]time.Time
	unlisted     int
	lastEnd      time.Time
	lists        *Lists
}

// readMachine reads the records and certificates of an endorsement key.
func (a *access) readMachine(ctx context.Context, ek string, now time.Time) (*machine, error) {
	records, err := a.readRecords(ctx)
	if err != nil {
		return nil, err
	}
	m := &machine{ek: ek, certificates: map[string]time.Time{}}
	if m.lists, err = a.listsOf(ctx, records); err != nil {
		return nil, err
	}
	unlisted := map[string]bool{}
	add := func(node, sum string, end time.Time) {
		if _, known := m.certificates[sum]; known || !now.Before(end) {
			return
		}
		m.certificates[sum] = end
		if !m.lists.refused[node] {
			unlisted[node] = true
		}
		if m.lastEnd.Before(end) {
			m.lastEnd = end
		}
	}
	for k := range records {
		r := &records[k]
		if !hasEK(r, ek) {
			continue
		}
		m.records, m.name = append(m.records, *r), r.Spec.Machine.Name
		for _, c := range r.Status.Certificates {
			if !c.FormerEK {
				add(r.Spec.NodeName, c.SHA256, c.NotAfter.Time)
			}
		}
	}
	for sum, c := range m.lists.entries {
		if c.EK == ek {
			add(c.NodeName, sum, c.NotAfter.Time)
		}
	}
	m.unlisted = len(unlisted)
	return m, nil
}

func hasEK(r *v1alpha1.NodeAttestation, ek string) bool {
	return r.Spec.EK != nil && r.Spec.EK.Fingerprint == ek
}

// listsOf reads the lists of the records' clusters. Usually that is one.
func (a *access) listsOf(ctx context.Context, records []v1alpha1.NodeAttestation) (*Lists, error) {
	cluster, err := a.clusterOf(records)
	if err != nil {
		cluster = "" // no record is left, or several clusters share a namespace
	}
	return a.readLists(ctx, cluster)
}

// suspend carries out the command.
func (i *invocation) suspend(ctx context.Context, node string, f *suspendFlags) error {
	if err := f.check(node); err != nil {
		return err
	}
	if err := checkReason(f.reason); err != nil {
		return err
	}
	return i.change(ctx, &f.changeFlags, func(ctx context.Context, a *access) (*plan, error) { return i.planSuspension(ctx, a, node, f) })
}

// planSuspension finds the machine, and says what is denied, refused and evicted.
func (i *invocation) planSuspension(ctx context.Context, a *access, node string, f *suspendFlags) (*plan, error) {
	suspensions, err := a.readSuspensions(ctx)
	if err != nil {
		return nil, err
	}
	var record *v1alpha1.NodeAttestation
	if node != "" {
		if record, err = a.recordOf(ctx, node, f.record); err != nil {
			return nil, err
		}
	}
	ek, own := f.ek, ""
	if record != nil && record.Spec.EK != nil {
		own = record.Spec.EK.Fingerprint
	}
	switch {
	case ek != "" && record != nil && own != ek:
		return nil, cli.Usage(fmt.Errorf("the record of node %q has another endorsement key: %s", node, own))
	case ek != "":
	case record == nil:
		return nil, cli.Fail(codeNotFound, "name the fingerprint of its endorsement key with --ek; kubelet-authenticator identify prints it on the machine", fmt.Errorf("node %q has no record", node))
	case own == "":
		return nil, cli.Usage(fmt.Errorf("the record of node %q has no endorsement key: its certificates can be revoked, and the machine cannot be suspended", node))
	default:
		ek = own
	}
	m, err := a.readMachine(ctx, ek, i.now)
	if err != nil {
		return nil, err
	}
	object := &v1alpha1.NodeSuspension{ObjectMeta: a.objectMeta(), Spec: v1alpha1.NodeSuspensionSpec{EK: ek, NodeName: node, Reason: f.reason}}
	object.Name = "ek-" + ek
	// for people, and for the policy about tokens of its pods
	if node == "" && len(m.records) == 1 {
		object.Spec.NodeName = m.records[0].Spec.NodeName
	}
	begin := stage{wait: m.untilSuspended(i, a, object), mustBeInForce: true}
	existing := suspensions[ek]
	if existing == nil {
		begin.writes = []write{creation(a.records, "NodeSuspension", object)}
	}
	p := &plan{question: "Suspend the machine?", otherwise: "nothing was changed", waitOnly: existing != nil, stages: []stage{begin}}
	out, name := &p.text, "with endorsement key "+ek
	if m.name != "" {
		name = m.name + " " + name
	}
	out.line("Suspend machine %s, reason %q:", name, prose(f.reason))
	out.addInForce(a.readInForce(ctx, i.now))
	if existing != nil {
		out.item("it is suspended already, since %s, reason %q: that stays as it is", stamp(existing.CreationTimestamp.Time), prose(existing.Spec.Reason))
	}
	out.item("the controller denies all its requests until kubectl attest resume, under each node name, whatever happens to its records")
	if len(m.records) == 0 {
		out.item("no record has this endorsement key")
	}
	for _, r := range m.records[:min(len(m.records), text.MaxNames)] {
		out.item("record %s/%s, node %s", r.Namespace, r.Name, r.Spec.NodeName)
	}
	if len(m.certificates) > 0 {
		out.item("API servers refuse all writes with its certificates (%d); the last one ends at %s and stays on its list until then", len(m.certificates), stamp(m.lastEnd))
		out.addLists(m.lists, m.unlisted)
	} else {
		out.item("no certificate of it is known that has not ended")
	}
	out.item("its node becomes NotReady, and stays NotReady until you resume the machine")
	out.addLimits()
	if !f.evict {
		out.item("without the authorizer it may still read the Secrets, ConfigMaps and volumes of its pods: --evict ends that")
		return p, nil
	}
	e, err := a.readEviction(ctx, node)
	if err != nil {
		return nil, err
	}
	e.describe(out)
	p.question, p.waitOnly = sprintf("Suspend the machine, and evict node %s?", node), false
	p.stages = append(p.stages, e.stage(i, a))
	return p, nil
}

// untilSuspended waits until the API servers refuse the machine's certificates.
func (m *machine) untilSuspended(i *invocation, a *access, object *v1alpha1.NodeSuspension) *wait {
	return &wait{
		look: func(ctx context.Context) (bool, string, error) {
			if err := a.records.Get(ctx, client.ObjectKeyFromObject(object), &v1alpha1.NodeSuspension{}); apierrors.IsNotFound(err) {
				return false, "", stop{cli.Fail(codeNotFound, "", fmt.Errorf("the NodeSuspension %s was deleted", object.Name))}
			} else if err != nil {
				return false, "", reached(err)
			}
			open, err := m.notSuspended(ctx, a, i.clock())
			if err != nil || len(open) == 0 {
				return err == nil, "", err
			}
			return false, "waiting until the suspension is in force: " + text.Names(open), nil
		},
		settle: settleTime,
		finish: func(time.Duration) error {
			return i.printf("%s of the machine suspended", text.Count(len(m.certificates), "certificate"))
		},
		ended: func() string {
			return "the suspension is recorded, and it is not known to be in force; nothing was evicted"
		},
		hint: "is the controller running? kubectl attest check",
	}
}

// notSuspended returns what the controller has not done yet: records without the condition, and
// certificates of the machine that no list has as suspended.
func (m *machine) notSuspended(ctx context.Context, a *access, now time.Time) (open []string, err error) {
	records, err := a.readRecords(ctx)
	if err != nil {
		return nil, err
	}
	lists, err := a.listsOf(ctx, records)
	if err != nil {
		return nil, err
	}
	for k := range records {
		if r := &records[k]; hasEK(r, m.ek) && !isSuspended(r) {
			open = append(open, "record "+r.Name)
		}
	}
	for _, sum := range slices.Sorted(maps.Keys(m.certificates)) {
		if entry, listed := lists.entries[sum]; now.Before(m.certificates[sum]) && (!listed || !entry.Suspended) {
			open = append(open, "certificate "+short(sum))
		}
	}
	return open, nil
}

// isSuspended reports whether the controller has applied a suspension to a record.
func isSuspended(r *v1alpha1.NodeAttestation) bool {
	return meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionSuspended)
}

// resume carries out the command.
func (i *invocation) resume(ctx context.Context, node string, f *suspendFlags) error {
	if err := f.check(node); err != nil {
		return err
	}
	if f.ek != "" && node != "" {
		return cli.Usage(errors.New("NODE and --ek exclude each other"))
	}
	return i.change(ctx, &f.changeFlags, func(ctx context.Context, a *access) (*plan, error) { return i.planResumption(ctx, a, node, f.ek) })
}

// planResumption finds the suspension that is to end, and says what the machine needs.
func (i *invocation) planResumption(ctx context.Context, a *access, node, ek string) (*plan, error) {
	s, err := a.findSuspension(ctx, node, ek)
	if err != nil {
		return nil, err
	}
	m, err := a.readMachine(ctx, s.Spec.EK, i.now)
	if err != nil {
		return nil, err
	}
	p := &plan{
		question: "Resume the machine?", otherwise: "nothing was changed",
		stages: []stage{{
			writes: []write{deletion(a.records, "NodeSuspension", s, false, "kubectl attest revocations")},
			wait:   m.untilResumed(a),
		}},
	}
	out := &p.text
	out.line("Resume the machine with endorsement key %s:", m.ek)
	out.item("it is suspended since %s, reason %q", stamp(s.CreationTimestamp.Time), prose(s.Spec.Reason))
	out.item("the controller decides on its requests again, by evidence")
	switch {
	case len(m.certificates) > 0 && len(m.records) > 0:
		out.item("its old certificates (%d) stay revoked; until %s the machine may request a new one with them, without a bootstrap credential", len(m.certificates), stamp(m.lastEnd))
		out.item("if it has lost them, it needs a bootstrap credential")
	case len(m.records) > 0:
		out.item("its old certificates have ended: it needs a bootstrap credential")
	default:
		out.item("it has no record: it enrols as a new machine, with a bootstrap credential, once a source of machines names it and no Node has its name")
	}
	return p, nil
}

// findSuspension finds it by the endorsement key. Without one, it finds the suspension by the
// records of the node, or by the node's name at the time of the suspension.
func (a *access) findSuspension(ctx context.Context, node, ek string) (*v1alpha1.NodeSuspension, error) {
	suspensions, err := a.readSuspensions(ctx)
	if err != nil {
		return nil, err
	}
	eks := map[string]bool{ek: true}
	if ek == "" {
		records, err := a.readRecords(ctx, client.MatchingFields{v1alpha1.FieldNodeName: node})
		if err != nil {
			return nil, err
		}
		for k := range records {
			if own := records[k].Spec.EK; own != nil {
				eks[own.Fingerprint] = true
			}
		}
		for _, s := range suspensions {
			if s.Spec.NodeName == node {
				eks[s.Spec.EK] = true
			}
		}
	}
	maps.DeleteFunc(eks, func(ek string, _ bool) bool { return suspensions[ek] == nil })
	found := slices.Sorted(maps.Keys(eks))
	switch len(found) {
	case 0:
		return nil, cli.Fail(codeNotFound, "kubectl attest revocations lists all suspensions", errors.New("no suspension is found"))
	case 1:
		return suspensions[found[0]], nil
	}
	return nil, cli.Usage(fmt.Errorf("several suspensions are of node %q: name one of them with --ek: %s", node, text.Names(found)))
}

// untilResumed waits until the controller has cleared the machine's records.
func (m *machine) untilResumed(a *access) *wait {
	return &wait{
		look: func(ctx context.Context) (bool, string, error) {
			records, err := a.readRecords(ctx)
			if err != nil {
				return false, "", err
			}
			for k := range records {
				if r := &records[k]; hasEK(r, m.ek) && isSuspended(r) {
					return false, sprintf("waiting for the controller: record %s still says Suspended", r.Name), nil
				}
			}
			return true, "the machine may attest again; kubectl attest describe shows when it has", nil
		},
		ended: func() string { return "the suspension is deleted, and the controller has not said so in the record" },
		hint:  "is the controller running? kubectl attest check",
	}
}
