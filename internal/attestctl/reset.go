// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/terminal"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// resetPlan is what reset is about to do.
type resetPlan struct {
	name   string
	record *v1alpha1.NodeAttestation
	// node is nil where there is none. deleteNode says that it is to be deleted, too.
	node       *metav1.PartialObjectMetadata
	deleteNode bool
	// waiting are requests that claim the node's name and wait. They stay.
	waiting []*Request
	now     time.Time
}

func (i *invocation) resetCommand() *cobra.Command {
	var yes, deleteNode bool
	var record string
	c := &cobra.Command{
		Use:   "reset NODE",
		Short: "Delete the record of a node, so that a machine can enrol again under its name",
		Long: `Delete the record of a node, so that its machine can enrol again: after its mainboard was replaced, or it was reinstalled. The machine that
enrols next under that node name, if a source of machines allows it, is the node. It says what it is going to do, and asks.

With an inventory a replaced TPM needs no reset: put the new endorsement key in the place of the old one.

While the Node exists, no machine without a record enrols under its name (NodeAlreadyRegistered). With --delete-node it is deleted, too:
its pods go with it. Use it, too, if the record was lost and the machine has no certificate any more.

Certificates are not revoked: they stay valid until they end. To revoke them, do that first: kubectl attest revoke NODE. After the reset the
record with their fingerprints is gone.`,
		Example: `  kubectl attest reset worker-7
  kubectl attest reset worker-7 --delete-node --yes`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: i.completeNode,
		RunE: func(c *cobra.Command, args []string) error {
			a, err := i.open(c.Context())
			if err != nil {
				return err
			}
			plan, err := a.planReset(c.Context(), args[0], record, deleteNode, i.now)
			if err != nil {
				return err
			}
			if _, err := io.WriteString(i.Stderr, plan.text()); err != nil {
				return err
			}
			if !plan.deletes() {
				return &failure{codeNotFound, "see above for what the machine needs", fmt.Errorf("node %q: there is nothing to delete", args[0])}
			}
			if err := i.confirm(c.Context(), sprintf("Reset node %s?", args[0]), "nothing was deleted", yes); err != nil {
				return err
			}
			return i.carryOut(c.Context(), a, plan)
		},
	}
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	c.Flags().BoolVar(&deleteNode, "delete-node", false, "delete the Node, too")
	c.Flags().StringVar(&record, "record", "", "name of the record, if several have the node's name")
	return c
}

// planReset reads the objects to delete.
func (a *access) planReset(ctx context.Context, name, record string, deleteNode bool, now time.Time) (*resetPlan, error) {
	p := &resetPlan{name: name, deleteNode: deleteNode, now: now}
	records, err := a.readRecords(ctx, client.MatchingFields{v1alpha1.FieldNodeName: name})
	if err != nil {
		return nil, err
	}
	if p.record, err = oneRecord(records, name, record); err != nil {
		return nil, err
	}
	if p.node, err = a.readNode(ctx, name); err != nil {
		return nil, err
	}
	requests, err := a.readRequests(ctx, now)
	if err != nil {
		return nil, err
	}
	p.waiting = newest(requests, func(r *Request) bool { return r.Waits() && !r.rehearsal && r.NodeName == name })
	return p, nil
}

// oneRecord returns the record of a node, nil if there is none. record is its name, or empty.
func oneRecord(records []v1alpha1.NodeAttestation, node, record string) (one *v1alpha1.NodeAttestation, err error) {
	var names []string
	for i := range records {
		if record == "" || records[i].Name == record {
			one = &records[i]
			names = append(names, records[i].Name)
		}
	}
	switch {
	case len(names) > 1:
		return nil, usage(fmt.Errorf("several records have node name %q: name one of them with --record: %s", node, text.Names(names)))
	case record != "" && len(names) == 0:
		return nil, &failure{codeNotFound, "kubectl attest describe " + node, fmt.Errorf("node %q has no record %q", node, record)}
	}
	return one, nil
}

func (p *resetPlan) deletes() bool { return p.record != nil || p.deleteNode && p.node != nil }

// text describes the planned changes, what does not change, and what the machine needs.
func (p *resetPlan) text() string {
	var out strings.Builder
	line := func(format string, arguments ...any) {
		_, _ = fmt.Fprintln(&out, sprintf(format, arguments...))
	}
	item := func(format string, arguments ...any) {
		out.WriteString("  - ")
		line(format, arguments...)
	}
	line("Node %s:", p.name)
	if p.record != nil {
		item("the record %s/%s of machine %s is deleted", p.record.Namespace, p.record.Name, p.record.Spec.Machine.Name)
		if ek := p.record.Spec.EK; ek != nil {
			item("its endorsement key %s is no longer tied to the node; a source that names it still admits it", ek.Fingerprint)
		}
		for _, c := range p.record.Status.Certificates {
			switch {
			case !p.now.Before(c.NotAfter.Time):
			case c.Revoked:
				item("its certificate %s is revoked, and stays so", short(c.SHA256))
			default:
				until := c.NotAfter.UTC().Format(time.RFC3339)
				if c.Recovered() {
					until += " at the latest"
				}
				item("its certificate %s stays valid until %s; to revoke it, do that before the reset: kubectl attest revoke %s", short(c.SHA256), until, p.name)
			}
		}
		if p.record.Status.Suspension != nil {
			item("the machine stays suspended, under each node name: kubectl attest resume %s", p.name)
		}
	} else {
		item("there is no record")
	}
	switch {
	case p.node == nil:
		item("there is no Node: a machine enrols under this name as for the first time")
	case p.deleteNode:
		item("the Node is deleted, and its pods with it")
	default:
		item("the Node stays: a machine with a bootstrap credential is refused (NodeAlreadyRegistered) until the Node is deleted (--delete-node)")
		item("the present machine can only renew with `credential: Recover`, a valid certificate, and a source that names its endorsement key")
	}
	item("a machine with a new TPM needs its new endorsement key in a source, such as the inventory, and a bootstrap credential")
	waiting, more := share(p.waiting, text.MaxNames)
	for _, r := range waiting {
		item("request %s of %s for this name waits, and stays: %s, EK %s", r.Name, r.Requester, r.Reason, short(r.fingerprint()))
	}
	if more > 0 {
		item("and %s", text.Count(more, "more request"))
	}
	return out.String()
}

// confirm asks. otherwise says what did not happen without a confirmation.
func (i *invocation) confirm(ctx context.Context, question, otherwise string, yes bool) error {
	if yes {
		return nil
	}
	err := terminal.Confirm(ctx, i.Stdin, i.Stderr, text.Line(question, maxMessage))
	switch {
	case errors.Is(err, terminal.ErrNobody):
		return &failure{codeNotConfirmed, "--yes confirms it in a script", fmt.Errorf("%s: %w", otherwise, err)}
	case errors.Is(err, terminal.ErrDeclined):
		return &failure{codeNotConfirmed, "", errors.New(otherwise)}
	}
	return err
}

// carryOut deletes exactly the shown objects.
func (i *invocation) carryOut(ctx context.Context, a *access, p *resetPlan) error {
	remove := func(c client.Client, object client.Object, what string) error {
		uid, version := object.GetUID(), object.GetResourceVersion()
		preconditions := client.Preconditions{UID: &uid}
		if what != "Node" { // the kubelet updates it all the time
			preconditions.ResourceVersion = &version
		}
		switch err := reached(c.Delete(ctx, object, preconditions)); {
		case apierrors.IsConflict(err):
			return &failure{codeUnexpected, "look at it again: kubectl attest describe " + p.name, fmt.Errorf("%s %s was not deleted: it has changed since it was shown", what, object.GetName())}
		case apierrors.IsNotFound(err):
			return &failure{codeNotFound, "", fmt.Errorf("%s %s is gone already", what, object.GetName())}
		case err != nil:
			return err
		}
		return i.printf("%s %s deleted", what, object.GetName())
	}
	if p.record != nil {
		if err := remove(a.records, p.record, "record"); err != nil {
			return err
		}
	}
	if p.deleteNode && p.node != nil {
		return remove(a.nodes, p.node, "Node")
	}
	return nil
}
