// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// Status is the output of the command status.
type Status struct {
	Nodes []NodeStatus `json:"nodes"`
	// Omitted is how many claims of requests are not in Nodes.
	Omitted int `json:"omitted,omitempty"`
	// Incomplete says what could not be read.
	Incomplete []string `json:"incomplete,omitempty"`
}

// NodeStatus is a node that has a record, or that asks for its first certificate.
type NodeStatus struct {
	Node string `json:"node"`
	// Claimed says that there is no record: node name and EK are what a request claims.
	Claimed bool `json:"claimed,omitempty"`
	// State sums up the record: Claimed or Rehearsed if there is none.
	State   recordState                `json:"state"`
	Record  string                     `json:"record,omitempty"`
	Machine *v1alpha1.MachineReference `json:"machine,omitempty"`
	EK      string                     `json:"ek,omitempty"`
	// Instance is the instance of a cloud that EK is the fingerprint of.
	Instance *v1alpha1.Instance `json:"instance,omitempty"`
	// Expires is when the last certificate in the record ends.
	Expires      *metav1.Time `json:"expires,omitempty"`
	LastAttested *metav1.Time `json:"lastAttested,omitempty"`
	// Reason and Message are the record's, if the record has a problem. Otherwise they are those of
	// a request that waits or was refused, if the node filed it with its own certificate. If
	// Claimed, they are those of the request that claims the node.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// WaitingSince is set while a request waits.
	WaitingSince *metav1.Time `json:"waitingSince,omitempty"`
	Request      string       `json:"request,omitempty"`

	// problem says that Reason is why the record refuses the machine.
	problem bool
}

// recordState says what a record means for its node. Its names are part of the output.
type recordState string

const (
	// nodeAttested: the node has a valid certificate.
	nodeAttested recordState = "Attested"
	// nodeExpired: its last certificate has ended.
	nodeExpired recordState = "Expired"
	// nodeRevoked: its newest certificate is revoked. It gets the next one if it attests.
	nodeRevoked recordState = "Revoked"
	// nodeSuspended: the machine gets no certificate until an operator resumes it.
	nodeSuspended recordState = "Suspended"
	// nodeAdmitted: it has a record, and no certificate yet.
	nodeAdmitted recordState = "Admitted"
	// nodeRehearsed: it has no record, and the request is a rehearsal.
	nodeRehearsed recordState = "Rehearsed"
	// nodeClaimed: it has no record.
	nodeClaimed recordState = "Claimed"
)

func stateOf(r *v1alpha1.NodeAttestation, expires *metav1.Time, now time.Time) recordState {
	switch {
	case r.Status.Suspension != nil:
		return nodeSuspended
	case meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionRevoked):
		return nodeRevoked
	case expires == nil:
		return nodeAdmitted
	case !now.Before(expires.Time):
		return nodeExpired
	}
	return nodeAttested
}

func (i *invocation) statusCommand() *cobra.Command {
	var format string
	var selector string
	var watch bool
	c := &cobra.Command{
		Use:   "status [NODE]",
		Short: "Show each node: state, machine, endorsement key, expiry, last reason, waiting since",
		Long: `Show each node that has a record, and each that asks for its first certificate. A line with a machine is the record's: REASON is what the
record says, or a request that the node filed with its own certificate. A line without one (MACHINE is <none>) is a claim: anyone with a bootstrap
token can file a request with any node name and endorsement key (EK).

STATE is Attested (has a valid certificate), Expired, Revoked (the newest certificate), Suspended (the machine gets none), Admitted (has a record
and no certificate yet), Rehearsed or Claimed (have no record). For Rehearsed, REASON is the verdict on kubelet-authenticator rehearse:
RehearsalPassed, or why it would be denied. Kubernetes deletes a rehearsal after a day.`,
		Example: `  kubectl attest status
  kubectl attest status worker-7 -o yaml
  kubectl attest status --selector=pool=gpu --watch`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: i.completeNode,
		RunE: func(c *cobra.Command, args []string) error {
			if watch && format != "" && format != formatWide {
				return cli.Usage(fmt.Errorf("--watch prints a table: --output may be %s", formatWide))
			}
			a, err := i.open(c.Context())
			if err != nil {
				return err
			}
			if watch {
				return i.watchStatus(c.Context(), a, strings.Join(args, ""), selector, format)
			}
			status, err := a.status(c.Context(), strings.Join(args, ""), selector, i.now)
			if err != nil {
				return err
			}
			if err := i.printStatus(status, format); err != nil {
				return err
			}
			if len(args) == 1 && len(status.Nodes) == 0 {
				return notFound(args[0])
			}
			return nil
		},
	}
	outputFlag(c, &format, formatWide)
	c.Flags().StringVarP(&selector, "selector", "l", "", "only nodes whose Node has these labels, as for kubectl get")
	c.Flags().BoolVarP(&watch, "watch", "w", false, "keep running, and print a node again when its status changes")
	return c
}

// formatWide is a format of the command status: the table with more columns.
const formatWide = "wide"

// watchStatus prints the table, and then the lines that are new or have changed, until ctx ends.
func (i *invocation) watchStatus(ctx context.Context, a *access, node string, selector string, format string) error {
	if _, err := labels.Parse(selector); err != nil {
		return cli.Usage(fmt.Errorf("--selector: %w", err))
	}
	printed, head := map[string]bool{}, true
	err := i.poll(ctx, lastPoll, func(ctx context.Context) (bool, string, error) {
		i.now = i.clock()
		status, err := a.status(ctx, node, selector, i.now)
		switch {
		case meta.IsNoMatchError(err) || errors.Is(err, errNoNamespace):
			return false, "", stop{err}
		case err != nil:
			return false, "", err
		case len(status.Incomplete) > 0: // without the requests, unchanged nodes would seem to change
			return false, sprintf("warning: trying again: cannot be read: %s", strings.Join(status.Incomplete, "; ")), nil
		}
		remark := ""
		switch {
		case status.Omitted > 0:
			remark = omission(status.Omitted)
		case len(status.Nodes) == 0 && node != "":
			remark = sprintf("node %q has no record and no request yet", node)
		case len(status.Nodes) == 0:
			remark = "no node has a record or a request yet"
		}
		current := map[string]bool{}
		changed := slices.DeleteFunc(status.Nodes, func(n NodeStatus) bool {
			line, _ := json.Marshal(n) // cannot fail: it is plain data
			current[string(line)] = true
			return printed[string(line)]
		})
		printed = current
		if len(changed) == 0 {
			return false, remark, nil
		}
		printHead := head
		head = false
		return false, remark, i.printNodes(changed, format == formatWide, printHead)
	})
	if errors.Is(err, errWaitEnded) {
		return nil // a person has ended it
	}
	return err
}

var errNoNamespace = errors.New("there is no namespace")

// readAllRecords returns an error if the namespace of the records does not exist. Requests have no
// namespace, so they would be shown all the same.
func (a *access) readAllRecords(ctx context.Context) ([]v1alpha1.NodeAttestation, error) {
	records, err := a.readRecords(ctx)
	if len(records) == 0 && err == nil && apierrors.IsNotFound(a.records.Get(ctx, client.ObjectKey{Name: a.namespace}, &corev1.Namespace{})) {
		err = cli.Fail(codeNotFound, "--namespace is that of the records, with Cluster API that of the Cluster", fmt.Errorf("%w %q", errNoNamespace, a.namespace))
	}
	return records, err
}

func notFound(node string) error {
	return cli.Fail(codeNotFound, "kubectl attest pending lists all requests that wait; finished ones vanish after an hour", fmt.Errorf("node %q has no record and no request", node))
}

// status collects the status of one node, or of all, or of those whose Node the selector selects.
func (a *access) status(ctx context.Context, node string, selector string, now time.Time) (*Status, error) {
	records, err := a.readAllRecords(ctx)
	if err != nil {
		return nil, err
	}
	wanted := func(name string) bool { return node == "" || name == node }
	if selector != "" {
		selected, err := a.labelledNodes(ctx, selector)
		if err != nil {
			return nil, err
		}
		wanted = func(name string) bool { return slices.Contains(selected, name) && (node == "" || name == node) }
	}
	s := &Status{Nodes: []NodeStatus{}}
	requests, err := a.readRequests(ctx, now)
	if err != nil {
		s.Incomplete = append(s.Incomplete, sprintf("requests: %v", err))
	}
	records = slices.DeleteFunc(records, func(r v1alpha1.NodeAttestation) bool { return !wanted(r.Spec.NodeName) })
	requests = slices.DeleteFunc(requests, func(r Request) bool { return !wanted(r.NodeName) })
	s.fill(records, requests, now)
	return s, nil
}

// fill joins records and requests. A record's line has only the request that the record names, and
// requests that the node filed with its certificate. All others are claims: the EK of a hello is
// public, so anyone with a bootstrap token can file a copy of a hello.
func (s *Status) fill(records []v1alpha1.NodeAttestation, requests []Request, now time.Time) {
	known, named, attested := map[[2]string]int{}, map[string]int{}, map[string]bool{}
	for i := range records {
		n := recorded(&records[i], now)
		known[[2]string{n.Node, n.EK}], attested[n.Node] = len(s.Nodes), true
		if records[i].Spec.Instance != nil {
			known[[2]string{n.Node, ""}] = len(s.Nodes) // a cloud's request claims no instance that can be read here
		}
		if accepted := records[i].Status.Request; accepted != nil {
			named[string(accepted.UID)] = len(s.Nodes)
		}
		s.Nodes = append(s.Nodes, n)
	}
	var claims, rehearsals []*Request
	for _, r := range newest(requests, func(r *Request) bool { return r.Waits() || r.Reason != "" && r.Reason != attestation.ReasonCompleted }) {
		if r.rehearsal {
			if !attested[r.NodeName] {
				rehearsals = append(rehearsals, r)
			}
			continue
		}
		at, found := named[r.uid]
		if !found && r.Requester == "system:node:"+r.NodeName {
			at, found = known[[2]string{r.NodeName, r.fingerprint()}]
		}
		switch {
		case found:
			s.Nodes[at].add(r)
		case r.Waits() || r.refused():
			claims = append(claims, r)
		}
	}
	claims, s.Omitted = share(claims, maxClaims)
	rehearsals, omitted := share(rehearsals, maxClaims) // apart: a fleet that rehearses hides no real request
	s.Omitted += omitted
	for _, r := range append(claims, rehearsals...) {
		n := NodeStatus{Node: r.NodeName, Claimed: true, State: nodeClaimed, EK: r.fingerprint()}
		if r.rehearsal {
			n.State = nodeRehearsed
		}
		n.add(r)
		s.Nodes = append(s.Nodes, n)
	}
	slices.SortStableFunc(s.Nodes, func(a, b NodeStatus) int {
		return cmp.Or(trueFirst(!a.Claimed, !b.Claimed), strings.Compare(a.Node, b.Node))
	})
}

func recorded(r *v1alpha1.NodeAttestation, now time.Time) NodeStatus {
	n := NodeStatus{Node: r.Spec.NodeName, Record: r.Namespace + "/" + r.Name, Machine: &r.Spec.Machine, LastAttested: r.Status.LastAttested}
	if r.Spec.EK != nil {
		n.EK = r.Spec.EK.Fingerprint
	}
	n.Instance = r.Spec.Instance
	n.Expires = expiry(r)
	n.State = stateOf(r, n.Expires, now)
	switch {
	case r.Status.Suspension != nil:
		n.Reason, n.Message, n.problem = v1alpha1.ReasonSuspended, r.Status.Suspension.Reason, true
	case n.State == nodeRevoked:
		n.Reason, n.Message, n.problem = v1alpha1.ReasonRevoked, meta.FindStatusCondition(r.Status.Conditions, v1alpha1.ConditionRevoked).Message, true
	case r.Status.EKReplaced != nil:
		n.Reason, n.Message, n.problem = v1alpha1.ReasonEKReplaced, "the source of the EK names another one for the machine", true
	case r.Status.LastAttested != nil:
		n.Reason = v1alpha1.ReasonAttested
	}
	return n
}

// expiry is when the last certificate of the machine's present EK ends, nil if there is none. The
// end of a recovered certificate is not known.
func expiry(r *v1alpha1.NodeAttestation) (last *metav1.Time) {
	for i := range r.Status.Certificates {
		if c := &r.Status.Certificates[i]; !c.FormerEK && !c.Recovered() && (last == nil || last.Before(&c.NotAfter)) {
			last = &c.NotAfter
		}
	}
	return last
}

// add adds a request. Its reason does not replace a problem of the record.
func (n *NodeStatus) add(r *Request) {
	n.Request = r.Name
	if !n.problem {
		n.Reason, n.Message = r.Reason, r.Message
	}
	if r.Waits() {
		n.WaitingSince = &r.Created
	}
}

func (i *invocation) printStatus(s *Status, format string) error {
	i.warnIncomplete(s.Incomplete, s.Omitted)
	if format != "" && format != formatWide {
		return i.Print(format, s)
	}
	if len(s.Nodes) == 0 {
		return nil
	}
	return i.printNodes(s.Nodes, format == formatWide, true)
}

// printNodes prints a table, if wide with more columns.
func (i *invocation) printNodes(nodes []NodeStatus, wide, head bool) error {
	rows := make([][]any, 0, len(nodes))
	for _, n := range nodes {
		machine, expires, waiting, attested := "", "", "", ""
		if n.Machine != nil {
			machine = n.Machine.Name
		}
		if n.Expires != nil {
			expires = until(n.Expires.Time, i.now)
		}
		if n.WaitingSince != nil {
			waiting = age(n.WaitingSince.Time, i.now)
		}
		if n.LastAttested != nil {
			attested = age(n.LastAttested.Time, i.now)
		}
		ek := short(n.EK)
		if n.Instance != nil {
			ek = n.Instance.ID
		}
		row := []any{n.Node, n.State, machine, ek, expires, n.Reason, waiting}
		if wide {
			row = append(row, attested, n.Record, n.Request, n.Message)
		}
		rows = append(rows, row)
	}
	columns := []any{"NODE", "STATE", "MACHINE", "EK", "EXPIRES", "REASON", "WAITING"}
	if wide {
		columns = append(columns, "ATTESTED", "RECORD", "REQUEST", "MESSAGE")
	}
	if !head {
		columns = nil
	}
	return printTable(i.Stdout, columns, rows)
}

// warnIncomplete warns of missing parts of the output.
func (i *invocation) warnIncomplete(incomplete []string, omitted int) {
	for _, what := range incomplete {
		i.say("warning: cannot be read: %s", what)
	}
	if omitted > 0 {
		i.say("%s", omission(omitted))
	}
}

// omission says that claims are not shown.
func omission(omitted int) string {
	return sprintf("warning: %s of requests not shown; name a node to see its own", text.Count(omitted, "more claim"))
}

// completeNode completes a node's name by the records.
func (i *invocation) completeNode(c *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names, err := i.nodeNames(c.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeNodes completes names of nodes that are not named yet.
func (i *invocation) completeNodes(c *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	names, directive := i.completeNode(c, nil, "")
	return slices.DeleteFunc(names, func(name string) bool { return slices.Contains(args, name) }), directive
}

func (i *invocation) nodeNames(ctx context.Context) ([]string, error) {
	a, err := i.open(ctx)
	if err != nil {
		return nil, err
	}
	records, err := a.readRecords(ctx)
	if err != nil {
		return nil, err
	}
	var names []string
	for i := range records {
		// Such a name needs no quotes in a shell.
		if name := records[i].Spec.NodeName; len(validation.IsDNS1123Subdomain(name)) == 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}
