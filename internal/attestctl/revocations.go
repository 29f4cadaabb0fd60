// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

const (
	// maxRevocations limits how many revocations, and how many suspensions, are shown.
	maxRevocations = 100
	// overlay switches the feature on.
	overlay = "packaging/kubernetes-revocation"
)

// Revocations is the output of the command revocations.
type Revocations struct {
	InForce InForce `json:"inForce"`
	Lists   Lists   `json:"lists"`
	// Revocations are the newest, and Suspensions the newest.
	Revocations []RevocationState  `json:"revocations"`
	Suspensions []SuspendedMachine `json:"suspensions"`
	// Omitted is how many of both are not shown.
	Omitted int `json:"omitted,omitempty"`
}

// RevocationState is how far a NodeRevocation has come.
type RevocationState struct {
	Name     string      `json:"name"`
	Created  metav1.Time `json:"created"`
	Mode     string      `json:"mode"`
	All      bool        `json:"all,omitempty"`
	Nodes    int32       `json:"nodes"`
	Renewed  int32       `json:"renewed"`
	Revoked  int32       `json:"revoked"`
	Waiting  []string    `json:"waiting,omitempty"`
	Complete bool        `json:"complete"`
	Reason   string      `json:"reason"`
}

// SuspendedMachine is a machine that is suspended.
type SuspendedMachine struct {
	EK      string      `json:"ek"`
	Node    string      `json:"node,omitempty"`
	Created metav1.Time `json:"created"`
	Reason  string      `json:"reason"`
}

func (i *invocation) revocationsCommand() *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:   "revocations",
		Short: "Show revocations, suspended machines, and how full the lists are",
		Long: `Show revocations and how far they have come, suspended machines, how full the lists of revoked certificates are, and whether the API
servers refuse what is on them. WAITING are nodes without a newer certificate.`,
		Example: `  kubectl attest revocations
  kubectl attest revocations -o json | jq -r '.suspensions[].ek'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			a, err := i.open(c.Context())
			if err != nil {
				return err
			}
			r, err := i.collectRevocations(c.Context(), a)
			if err != nil {
				return err
			}
			return i.printRevocations(r, format)
		},
	}
	outputFlag(c, &format)
	return c
}

func (i *invocation) collectRevocations(ctx context.Context, a *access) (*Revocations, error) {
	suspensions, err := a.readSuspensions(ctx)
	if err != nil {
		return nil, err
	}
	records, err := a.readRecords(ctx)
	if err != nil {
		return nil, err
	}
	cluster, err := a.clusterOf(records)
	if err != nil {
		return nil, err
	}
	lists, err := a.readLists(ctx, cluster)
	if err != nil {
		return nil, err
	}
	revocations, err := a.readRevocations(ctx, cluster)
	if err != nil {
		return nil, err
	}
	r := &Revocations{InForce: a.readInForce(ctx, i.now), Lists: *lists, Revocations: []RevocationState{}, Suspensions: []SuspendedMachine{}}
	for k := range revocations {
		r.Revocations = append(r.Revocations, newRevocationState(&revocations[k]))
	}
	for _, s := range suspensions {
		r.Suspensions = append(r.Suspensions, SuspendedMachine{text.Cut(s.Spec.EK, maxName), text.Cut(s.Spec.NodeName, maxName), s.CreationTimestamp, text.Cut(s.Spec.Reason, maxMessage)})
	}
	slices.SortFunc(r.Suspensions, func(a, b SuspendedMachine) int {
		return cmp.Or(b.Created.Compare(a.Created.Time), strings.Compare(a.EK, b.EK))
	})
	for _, n := range []int{len(r.Revocations), len(r.Suspensions)} {
		r.Omitted += max(0, n-maxRevocations)
	}
	r.Revocations = r.Revocations[:min(len(r.Revocations), maxRevocations)]
	r.Suspensions = r.Suspensions[:min(len(r.Suspensions), maxRevocations)]
	return r, nil
}

func newRevocationState(r *v1alpha1.NodeRevocation) RevocationState {
	s := RevocationState{
		Name: text.Cut(r.Name, maxName), Created: r.CreationTimestamp, Mode: text.Cut(string(r.Spec.Mode), maxName), All: r.Spec.All,
		Nodes: r.Status.Nodes, Renewed: r.Status.Renewed, Revoked: r.Status.Revoked,
		Complete: meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionComplete), Reason: text.Cut(r.Spec.Reason, maxMessage),
	}
	for _, name := range r.Status.Waiting[:min(len(r.Status.Waiting), text.MaxNames)] {
		s.Waiting = append(s.Waiting, text.Cut(name, maxName))
	}
	return s
}

func (i *invocation) printRevocations(r *Revocations, format string) error {
	if r.Omitted > 0 {
		i.say("warning: %d more are not shown; see kubectl get noderevocations,nodesuspensions", r.Omitted)
	}
	if format != "" {
		return i.Print(format, r)
	}
	l := &r.Lists
	ends := ""
	if l.NextEnd != nil {
		ends = fmt.Sprintf("; the first one leaves at %s, the last one at %s", stamp(l.NextEnd.Time), stamp(l.LastEnd.Time))
	}
	if err := i.printf("In force:  %s", r.InForce); err != nil {
		return err
	}
	if err := i.printf("Lists:     %d of %d places used, %s suspended, %d not in force%s", l.places, l.Capacity, text.Count(l.Suspended, "certificate"), l.NotInForce, ends); err != nil {
		return err
	}
	if len(r.Revocations) > 0 {
		rows := make([][]any, 0, len(r.Revocations))
		for _, s := range r.Revocations {
			number := func(n int32) string { return strconv.Itoa(int(n)) }
			rows = append(rows, []any{s.Name, s.Mode, number(s.Nodes), number(s.Renewed), number(s.Revoked), strings.Join(s.Waiting, ","), strconv.FormatBool(s.Complete), age(s.Created.Time, i.now), prose(s.Reason)})
		}
		if err := printTable(i.Stdout, []any{"REVOCATION", "MODE", "NODES", "RENEWED", "REVOKED", "WAITING", "COMPLETE", "AGE", "REASON"}, rows); err != nil {
			return err
		}
	}
	if len(r.Suspensions) == 0 {
		return nil
	}
	rows := make([][]any, 0, len(r.Suspensions))
	for _, s := range r.Suspensions {
		rows = append(rows, []any{short(s.EK), s.Node, age(s.Created.Time, i.now), prose(s.Reason)})
	}
	return printTable(i.Stdout, []any{"SUSPENDED EK", "NODE", "AGE", "REASON"}, rows)
}

// revocationKinds are the kinds of the overlay.
var revocationKinds = []string{"NodeRevocation", "NodeSuspension", "RevocationSlice"}

// lacksRevocation reports whether an error says that the cluster does not have these kinds.
func lacksRevocation(err error) bool {
	var kind *meta.NoKindMatchError
	return errors.As(err, &kind) && slices.Contains(revocationKinds, kind.GroupKind.Kind)
}

// InForce is what the controller says about the refusal of revoked certificates.
type InForce struct {
	// Status is that of the condition, Unknown if there is none, or it cannot be read.
	Status  corev1.ConditionStatus `json:"status"`
	Reason  string                 `json:"reason,omitempty"`
	Message string                 `json:"message,omitempty"`
}

func (f InForce) isTrue() bool { return f.Status == corev1.ConditionTrue }

func (f InForce) String() string {
	says := string(f.Status)
	if f.Reason != "" {
		says += " (" + f.Reason + ")"
	}
	if f.Message != "" {
		says += ": " + f.Message
	}
	return says
}

// readInForce reads the condition. Errors of reading are in the result.
func (a *access) readInForce(ctx context.Context, now time.Time) InForce {
	e := &examination{access: a, now: now}
	e.checkConfiguration(ctx) // says which Namespace has it
	c, name, err := e.readCondition(ctx, telemetry.ConditionRevocation)
	switch {
	case err != nil:
		return InForce{corev1.ConditionUnknown, "", sprintf("it cannot be read: %v", err)}
	case c == nil:
		return InForce{corev1.ConditionUnknown, "", fmt.Sprintf("namespace %s has no condition %s", name, telemetry.ConditionRevocation)}
	}
	return InForce{c.Status, text.Cut(c.Reason, maxName), text.Cut(c.Message, maxMessage)}
}

// Lists is what the RevocationSlices of a cluster hold.
type Lists struct {
	// Certificates is how many are on the lists, Suspended how many of them may not even ask for a
	// new certificate.
	Certificates int `json:"certificates"`
	Suspended    int `json:"suspended"`
	// NotInForce is how many are certificates of nodes that are on no list with a policy.
	NotInForce int `json:"notInForce"`
	// Capacity is how many certificates the lists with a policy hold. A node needs one place.
	Capacity int `json:"capacity"`
	// NextEnd and LastEnd are the times when the first and the last certificate expire.
	NextEnd *metav1.Time `json:"nextEnd,omitempty"`
	LastEnd *metav1.Time `json:"lastEnd,omitempty"`

	entries map[string]v1alpha1.RevokedCertificate
	// refused has the names of the nodes on a list with a policy.
	refused map[string]bool
	// places is how many certificates are on lists with a policy.
	places int
}

// room returns for how many more nodes there is room.
func (l *Lists) room() int { return max(0, l.Capacity-l.places) }

// readLists reads the lists of a cluster, or all in the namespace if no cluster is given. The
// controller removes a certificate some minutes after its end. Until then it takes a place.
func (a *access) readLists(ctx context.Context, cluster string) (*Lists, error) {
	options := []client.ListOption{client.InNamespace(a.namespace)}
	if cluster != "" {
		options = append(options, client.MatchingFields{v1alpha1.FieldCluster: cluster})
	}
	l := &Lists{
		Capacity: revocation.PolicyCount * revocation.SliceCapacity, entries: map[string]v1alpha1.RevokedCertificate{}, refused: map[string]bool{},
	}
	err := readEach(ctx, a.records, func(s *v1alpha1.RevocationSlice) {
		for _, c := range s.Spec.Certificates {
			l.entries[c.SHA256] = c
			if s.Spec.Number <= revocation.PolicyCount {
				l.refused[c.NodeName] = true
				l.places++
			}
		}
	}, options...)
	if err != nil {
		return nil, err
	}
	for _, c := range l.entries {
		l.Certificates++
		if c.Suspended {
			l.Suspended++
		}
		if !l.refused[c.NodeName] {
			l.NotInForce++
		}
		if l.NextEnd == nil || c.NotAfter.Before(l.NextEnd) {
			l.NextEnd = &c.NotAfter
		}
		if l.LastEnd == nil || l.LastEnd.Before(&c.NotAfter) {
			l.LastEnd = &c.NotAfter
		}
	}
	return l, nil
}

// readSuspensions returns the suspensions in the namespace, by the fingerprint of the endorsement
// key.
func (a *access) readSuspensions(ctx context.Context) (map[string]*v1alpha1.NodeSuspension, error) {
	all := map[string]*v1alpha1.NodeSuspension{}
	err := readEach(ctx, a.records, func(s *v1alpha1.NodeSuspension) { all[s.Spec.EK] = s }, client.InNamespace(a.namespace))
	return all, err
}

// readRevocations returns the revocations of a cluster, the newest first.
func (a *access) readRevocations(ctx context.Context, cluster string) (all []v1alpha1.NodeRevocation, err error) {
	err = readEach(ctx, a.records, func(r *v1alpha1.NodeRevocation) {
		if r.Spec.Cluster == cluster {
			all = append(all, *r)
		}
	}, client.InNamespace(a.namespace))
	slices.SortStableFunc(all, func(a, b v1alpha1.NodeRevocation) int { return b.CreationTimestamp.Compare(a.CreationTimestamp.Time) })
	return all, err
}

// addLists says whether the lists have room for more nodes.
func (p *planText) addLists(l *Lists, more int) {
	switch room := l.room(); {
	case more == 0:
	case room >= more:
		p.item("the lists have room: %d of %d places are free", room, l.Capacity)
	default:
		p.item("the lists have no room for %d of the nodes: their certificates are recorded, and NOT refused until room appears (%d of %d places are free)", more-room, room, l.Capacity)
	}
}

// addInForce warns if revoked certificates are not refused.
func (p *planText) addInForce(f InForce) {
	if !f.isTrue() {
		p.item("WARNING: this is recorded, and is NOT in force: the condition %s is %s", telemetry.ConditionRevocation, f)
	}
}

// addLimits says what stays possible after a revocation.
func (p *planText) addLimits() {
	p.item("admission policies refuse writes. Reads are refused only where API servers ask the authorizer (docs/revocation.md). Open watches, and tokens that the node requested for its pods, stay usable")
}

// mustBeInForce returns an error if revoked certificates are not refused.
func (i *invocation) mustBeInForce(ctx context.Context, a *access) error {
	if f := a.readInForce(ctx, i.now); !f.isTrue() {
		return cli.Fail(codeNotInForce, "kubectl attest check says what can be done", fmt.Errorf("it is recorded, and not in force: the condition %s is %s", telemetry.ConditionRevocation, f))
	}
	return nil
}
