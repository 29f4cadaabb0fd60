// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// maxRevocations limits how many revocations, and how many suspensions, are shown.
const maxRevocations = 100

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
	var format *output
	c := &cobra.Command{
		Use:   "revocations",
		Short: "Show revocations, suspended machines, and how full the lists are",
		Long: `Show revocations and how far they have come, suspended machines, how full the lists of revoked certificates are, and whether the API
servers refuse what is on them. WAITING are nodes without a newer certificate.`,
		Example: `  kubectl attest revocations
  kubectl attest revocations -o json | jq -r '.suspensions[].ek'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := format.check(); err != nil {
				return err
			}
			a, err := i.open(c.Context())
			if err != nil {
				return err
			}
			r, err := i.collectRevocations(c.Context(), a)
			if err != nil {
				return err
			}
			return i.printRevocations(r, format.format)
		},
	}
	format = outputFlag(c)
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
		if c := b.Created.Compare(a.Created.Time); c != 0 {
			return c
		}
		return strings.Compare(a.EK, b.EK)
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
		return i.print(format, r)
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
		rows = append(rows, []any{s.EK[:min(len(s.EK), 12)], s.Node, age(s.Created.Time, i.now), prose(s.Reason)})
	}
	return printTable(i.Stdout, []any{"SUSPENDED EK", "NODE", "AGE", "REASON"}, rows)
}
