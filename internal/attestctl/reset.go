// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

func (i *invocation) resetCommand() *cobra.Command {
	f := &changeFlags{}
	var deleteNode bool
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
			return i.change(c.Context(), f, func(ctx context.Context, a *access) (*plan, error) {
				return i.planReset(ctx, a, args[0], record, deleteNode)
			})
		},
	}
	f.addYes(c)
	c.Flags().BoolVar(&deleteNode, "delete-node", false, "delete the Node, too")
	c.Flags().StringVar(&record, "record", "", "name of the record, if several have the node's name")
	return c
}

// planReset says what is deleted, what stays, and what the machine needs.
func (i *invocation) planReset(ctx context.Context, a *access, name, recordName string, deleteNode bool) (*plan, error) {
	record, err := a.recordOf(ctx, name, recordName)
	if err != nil {
		return nil, err
	}
	node, err := a.readNode(ctx, name)
	if err != nil {
		return nil, err
	}
	requests, err := a.readRequests(ctx, i.now)
	if err != nil {
		return nil, err
	}
	p := &plan{question: sprintf("Reset node %s?", name), otherwise: "nothing was deleted"}
	var deletions []write
	describe := "kubectl attest describe " + name
	out := &p.text
	out.line("Node %s:", name)
	if record == nil {
		out.item("there is no record")
	} else {
		deletions = append(deletions, deletion(a.records, "record", record, true, describe))
		out.item("the record %s/%s of machine %s is deleted", record.Namespace, record.Name, record.Spec.Machine.Name)
		if ek := record.Spec.EK; ek != nil {
			out.item("its endorsement key %s is no longer tied to the node; a source that names it still admits it", ek.Fingerprint)
		}
		for _, c := range record.Status.Certificates {
			switch {
			case !i.now.Before(c.NotAfter.Time):
			case c.Revoked:
				out.item("its certificate %s is revoked, and stays so", short(c.SHA256))
			default:
				until := stamp(c.NotAfter.Time)
				if c.Recovered() {
					until += " at the latest"
				}
				out.item("its certificate %s stays valid until %s; to revoke it, do that before the reset: kubectl attest revoke %s", short(c.SHA256), until, name)
			}
		}
		if record.Status.Suspension != nil {
			out.item("the machine stays suspended, under each node name: kubectl attest resume %s", name)
		}
	}
	switch {
	case node == nil:
		out.item("there is no Node: a machine enrols under this name as for the first time")
	case deleteNode:
		// the kubelet updates it all the time, so it need not be unchanged
		deletions = append(deletions, deletion(a.nodes, "Node", node, false, describe))
		out.item("the Node is deleted, and its pods with it")
	default:
		out.item("the Node stays: a machine with a bootstrap credential is refused (NodeAlreadyRegistered) until the Node is deleted (--delete-node)")
		out.item("the present machine can only renew with `credential: Recover`, a valid certificate, and a source that names its endorsement key")
	}
	out.item("a machine with a new TPM needs its new endorsement key in a source, such as the inventory, and a bootstrap credential")
	claims := newest(requests, func(r *Request) bool { return r.Waits() && !r.rehearsal && r.NodeName == name })
	claims, more := share(claims, text.MaxNames)
	for _, r := range claims {
		out.item("request %s of %s for this name waits, and stays: %s, EK %s", r.Name, r.Requester, r.Reason, short(r.fingerprint()))
	}
	if more > 0 {
		out.item("and %s", text.Count(more, "more request"))
	}
	p.stages = []stage{{writes: deletions}}
	if len(deletions) == 0 {
		p.nothing = cli.Fail(codeNotFound, "see above for what the machine needs", fmt.Errorf("node %q: there is nothing to delete", name))
	}
	return p, nil
}

// recordOf returns the record of a node, nil if there is none. name is the record's, or empty.
func (a *access) recordOf(ctx context.Context, node, name string) (one *v1alpha1.NodeAttestation, err error) {
	records, err := a.readRecords(ctx, client.MatchingFields{v1alpha1.FieldNodeName: node})
	if err != nil {
		return nil, err
	}
	var names []string
	for i := range records {
		if name == "" || records[i].Name == name {
			one = &records[i]
			names = append(names, records[i].Name)
		}
	}
	switch {
	case len(names) > 1:
		return nil, cli.Usage(fmt.Errorf("several records have node name %q: name one of them with --record: %s", node, text.Names(names)))
	case name != "" && len(names) == 0:
		return nil, cli.Fail(codeNotFound, "kubectl attest describe "+node, fmt.Errorf("node %q has no record %q", node, name))
	}
	return one, nil
}
