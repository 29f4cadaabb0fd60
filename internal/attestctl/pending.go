// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"slices"

	"github.com/spf13/cobra"
)

// formatInventory is a format of the command pending.
const formatInventory = "inventory"

// Pending is the output of the command pending.
type Pending struct {
	// Requests are the newest of each node name and EK, the oldest first.
	Requests []Request `json:"requests"`
	// Omitted is how many are not in Requests.
	Omitted int `json:"omitted,omitempty"`
}

func (i *invocation) pendingCommand() *cobra.Command {
	var format *output
	c := &cobra.Command{
		Use:   "pending [NODE...]",
		Short: "List the requests that wait, and why; with -o inventory, as entries for the inventory",
		Long: `List the requests that wait, the newest of each node name and endorsement key. The API server vouches for REQUESTER and WAITING.
The rest is what the requester claims, or the controller's answer. What each reason means, and what to do, follows on standard error.

With -o inventory it prints entries for the inventory, of the machines that no source of machines names. To list a machine is to
trust it: a client with a bootstrap token can file a request with any endorsement key and any node name. Compare each fingerprint with
what "kubelet-authenticator identify" prints on the machine itself. What two requests claim differently is printed as a comment.`,
		Example: `  kubectl attest pending
  kubectl attest pending worker-7 -o inventory >> inventory.yaml`,
		RunE: func(c *cobra.Command, nodes []string) error {
			if err := format.check(); err != nil {
				return err
			}
			a, err := i.open(c.Context())
			if err != nil {
				return err
			}
			requests, err := a.readRequests(c.Context(), i.now)
			if err != nil {
				return err
			}
			waiting := newest(requests, (*Request).Waits)
			asked := func(r *Request) bool { return len(nodes) == 0 || slices.Contains(nodes, r.NodeName) }
			if format.format == formatInventory {
				return i.printEntries(c.Context(), a, waiting, asked)
			}
			return i.printPending(newPending(slices.DeleteFunc(waiting, func(r *Request) bool { return !asked(r) })), format.format)
		},
	}
	format = outputFlag(c, formatInventory)
	return c
}

func newPending(waiting []*Request) *Pending {
	p := &Pending{Requests: []Request{}}
	waiting, p.Omitted = share(waiting, maxClaims)
	for _, r := range waiting {
		p.Requests = append(p.Requests, *r)
	}
	return p
}

func (i *invocation) printPending(p *Pending, format string) error {
	i.warnIncomplete(nil, p.Omitted)
	if format != "" {
		return i.print(format, p)
	}
	if len(p.Requests) == 0 {
		i.say("no request waits")
		return nil
	}
	rows, reasons := make([][]any, 0, len(p.Requests)), make([]string, 0, len(p.Requests))
	for _, r := range p.Requests {
		reasons = append(reasons, r.Reason)
		issuer := ""
		if r.EK != nil && r.EK.Certificate != nil {
			issuer = r.EK.Certificate.Issuer
		}
		rows = append(rows, []any{r.NodeName, r.ProviderID, short(r.fingerprint()), issuer, r.Requester, age(r.Created.Time, i.now), r.Reason, r.Name})
	}
	if err := printTable(i.Stdout, []any{"NODE", "PROVIDER ID", "EK", "EK ISSUER", "REQUESTER", "WAITING", "REASON", "REQUEST"}, rows); err != nil {
		return err
	}
	for _, line := range remedies(reasons) {
		i.say("%s", prose(line))
	}
	return nil
}
