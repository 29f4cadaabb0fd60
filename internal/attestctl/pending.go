// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/machineentry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
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
	var format string
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
			if format == formatInventory {
				return i.printEntries(c.Context(), a, waiting, asked)
			}
			return i.printPending(newPending(slices.DeleteFunc(waiting, func(r *Request) bool { return !asked(r) })), format)
		},
	}
	outputFlag(c, &format, formatInventory)
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
		return i.Print(format, p)
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

// trustWarning is printed before entries.
var trustWarning = []string{
	"WARNING: to list a machine is to trust it. Anyone with a bootstrap token can create a request",
	"with any endorsement key and any node name. Before you list an entry, compare its fingerprint",
	"with what `kubelet-authenticator identify` prints on the machine itself.",
}

// candidate is an entry made of a request. problem says why an operator must not use the entry. It
// is empty if there is no problem.
type candidate struct {
	*Request
	problem string
}

// printEntries prints the requests that asked selects, as entries for the inventory. It compares
// all waiting requests, since a request of another node may claim the same endorsement key.
func (i *invocation) printEntries(ctx context.Context, a *access, waiting []*Request, asked func(*Request) bool) error {
	listed, err := a.readInventory(ctx)
	if err != nil {
		i.say("warning: the inventory cannot be read, so what it has already may be printed again: %v", err)
	}
	candidates := slices.DeleteFunc(judgeEntries(waiting, listed), func(c candidate) bool { return !asked(c.Request) })
	omitted := max(0, len(candidates)-maxClaims)
	out, err := renderEntries(candidates[:len(candidates)-omitted])
	if err != nil {
		return err
	}
	for _, line := range trustWarning {
		i.say("%s", line)
	}
	i.warnIncomplete(nil, omitted)
	if len(candidates) == 0 {
		i.say("no entry to print: no selected request waits for its machine to be listed; kubectl attest pending says why requests wait")
	}
	_, err = io.WriteString(i.Stdout, out)
	return err
}

// judgeEntries returns the requests of machines that no source of machines names. Where two claim
// the same, only the operator can say which one is right.
func judgeEntries(waiting []*Request, listed *inventory.Inventory) (all []candidate) {
	// Requests with the same claim count once.
	type claim struct{ node, id, ek string }
	claims := map[claim]bool{}
	byName, byProviderID, byEK := map[string]int{}, map[string]int{}, map[string]int{}
	waiting = slices.DeleteFunc(slices.Clone(waiting), func(r *Request) bool {
		c := claim{r.NodeName, r.ProviderID, r.fingerprint()}
		if claims[c] {
			return true
		}
		claims[c] = true
		byName[c.node]++
		byProviderID[c.id]++
		byEK[c.ek]++
		return false
	})
	for _, r := range waiting {
		if r.Reason != "" && r.Reason != string(verifier.ReasonMachineNotFound) || len(listed.ByEK(r.fingerprint())) > 0 {
			continue // it waits for something else
		}
		_, nodeListed := listed.ByNodeName(r.NodeName)
		_, nameListed := listed.ByName(r.NodeName)
		_, idListed := listed.ByProviderID(r.ProviderID)
		problem := ""
		switch {
		case r.fingerprint() == "":
			problem = "it names no endorsement key"
		case len(validation.IsDNS1123Subdomain(r.NodeName)) > 0:
			problem = "its node name is not valid"
		case r.ProviderID != "" && csr.CheckProviderID(r.ProviderID) != nil:
			problem = "its provider ID is not valid"
		case nodeListed:
			problem = "the inventory has this node name with another endorsement key: replace that one only if the TPM was replaced"
		case nameListed || listed.HasAddress(r.NodeName):
			problem = "the inventory has another machine with this name or address"
		case r.ProviderID != "" && idListed:
			problem = "the inventory has this provider ID for another machine"
		case byName[r.NodeName] > 1:
			problem = "requests with other endorsement keys or provider IDs claim this node name: one of them at most is right"
		case r.ProviderID != "" && byProviderID[r.ProviderID] > 1:
			problem = "other requests claim this provider ID: one of them at most is right"
		case byEK[r.fingerprint()] > 1:
			problem = "requests with other node names claim this endorsement key: one of them at most is right"
		}
		all = append(all, candidate{r, problem})
	}
	return all
}

// errOtherEntries says that the rendered document has other entries than those that were rendered.
var errOtherEntries = errors.New("the entries would not be read as they are meant: nothing is printed")

// renderEntries returns a document that an operator appends to the inventory. An entry with a
// problem is a comment. renderEntries parses the document again as the controller does. It returns
// an error if the document has anything but the entries without a problem.
func renderEntries(candidates []candidate) (string, error) {
	var out strings.Builder
	var meant []inventory.Machine
	out.WriteString("---\n")
	for _, line := range trustWarning {
		out.WriteString("# " + line + "\n")
	}
	var machines strings.Builder
	for _, c := range candidates {
		entry := entryOf(c.Request)
		body, issuer := entry.String(), "none"
		if c.EK != nil && c.EK.Certificate != nil {
			issuer = sprintf("%s (not verified)", c.EK.Certificate.Issuer)
		}
		machines.WriteString(sprintf("# Request %s of %s; EK certificate's issuer: %s", c.Name, c.Requester, issuer) + "\n")
		if c.problem == "" {
			machines.WriteString(body)
			meant = append(meant, inventory.Machine{Name: entry.NodeName, NodeName: entry.NodeName, ProviderID: entry.ProviderID, EKs: []inventory.EK{{Fingerprint: c.fingerprint()}}})
			continue
		}
		machines.WriteString(sprintf("# NOT LISTED: %s.", c.problem) + "\n")
		for line := range strings.Lines(body) {
			machines.WriteString("#   " + line)
		}
	}
	_, _ = fmt.Fprintf(&out, "apiVersion: %s\nkind: %s\nmachines:", inventory.APIVersion, inventory.Kind)
	if len(meant) == 0 {
		out.WriteString(" []")
	}
	out.WriteString("\n" + machines.String())
	read, err := inventory.Parse([]byte(out.String()))
	if err != nil {
		return "", fmt.Errorf("%w: %w", errOtherEntries, err)
	}
	if !slices.EqualFunc(read.All(), meant, func(a, b inventory.Machine) bool {
		return a.Name == b.Name && a.NodeName == b.NodeName && a.ProviderID == b.ProviderID && slices.Equal(a.EKs, b.EKs) &&
			len(a.DNSNames) == 0 && len(a.IPs) == 0 && a.TokenID == "" && !a.Disputed
	}) {
		return "", errOtherEntries
	}
	return out.String(), nil
}

// entryOf returns the entry that a request asks for.
func entryOf(r *Request) machineentry.Machine {
	m := machineentry.Machine{Name: r.NodeName, NodeName: r.NodeName, ProviderID: r.ProviderID}
	if ek := r.fingerprint(); ek != "" {
		m.EKs = []string{ek}
	}
	return m
}
