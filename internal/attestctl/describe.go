// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// Description is the output of the command describe.
type Description struct {
	Node    string                     `json:"node"`
	Records []v1alpha1.NodeAttestation `json:"records"`
	// History is in the order of time.
	History []Happening `json:"history"`
	// Omitted is how many older entries are not in History.
	Omitted    int      `json:"omitted,omitempty"`
	Incomplete []string `json:"incomplete,omitempty"`
}

// Happening is an entry of a node's history.
type Happening struct {
	Time metav1.Time `json:"time"`
	// From is the kind of object that the entry comes from: record, request or event. Name is the
	// name of that object.
	From string `json:"from"`
	Name string `json:"name"`
	What string `json:"what"`
}

// maxHistory limits the history. The newest are shown.
const maxHistory = 200

func (i *invocation) describeCommand() *cobra.Command {
	var format *output
	c := &cobra.Command{
		Use:   "describe NODE",
		Short: "Show the record of a node, and what happened to it by record, requests and Events",
		Long: `Show the record of a node, and what happened to it in the order of time. Requests and Events vanish after an hour. Requests that
claim the node's name are shown, of all requesters.`,
		Example:           "  kubectl attest describe worker-7",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: i.completeNode,
		RunE: func(c *cobra.Command, args []string) error {
			if err := format.check(); err != nil {
				return err
			}
			a, err := i.open(c.Context())
			if err != nil {
				return err
			}
			d, err := a.describe(c.Context(), args[0], i.now)
			if err != nil {
				return err
			}
			if len(d.Records) == 0 && len(d.History) == 0 {
				i.warnIncomplete(d.Incomplete, 0)
				return notFound(args[0])
			}
			return i.printDescription(d, format.format)
		},
	}
	format = outputFlag(c)
	return c
}

func (a *access) describe(ctx context.Context, node string, now time.Time) (*Description, error) {
	records, err := a.readRecords(ctx, client.MatchingFields{v1alpha1.FieldNodeName: node})
	if err != nil {
		return nil, err
	}
	d := &Description{Node: node, Records: records, History: []Happening{}}
	note := func(what string, err error) {
		if err != nil {
			d.Incomplete = append(d.Incomplete, what+": "+text.Line(err.Error(), maxMessage))
		}
	}
	requests, err := a.readRequests(ctx, now)
	note("requests", err)
	events, err := readEvents(ctx, a.nodes, clusterEvents)
	note("Events", err)
	if len(records) > 0 {
		more, err := readEvents(ctx, a.records, a.namespace)
		note("Events of the record", err)
		events = append(events, more...)
	}
	d.fill(requests, events)
	return d, nil
}

// fill makes the history.
func (d *Description) fill(requests []Request, events []event) {
	about := map[string]bool{"Node/" + d.Node: true}
	for i := range d.Records {
		r := &d.Records[i]
		r.ManagedFields = nil
		about["NodeAttestation/"+r.Name] = true
		d.addRecord(r)
	}
	for i := range requests {
		if r := &requests[i]; r.NodeName == d.Node {
			about["CertificateSigningRequest/"+r.Name] = true
			d.addRequest(r)
		}
	}
	for _, e := range events {
		if about[e.kind+"/"+e.name] {
			d.add(metav1.NewTime(e.at), "event", e.name, e.reason+": "+e.note)
		}
	}
	slices.SortStableFunc(d.History, func(a, b Happening) int { return a.Time.Compare(b.Time.Time) })
	if d.Omitted = max(0, len(d.History)-maxHistory); d.Omitted > 0 {
		d.History = d.History[d.Omitted:]
	}
}

func (d *Description) add(at metav1.Time, from, name, what string) {
	d.History = append(d.History, Happening{at, from, name, what})
}

func (d *Description) addRecord(r *v1alpha1.NodeAttestation) {
	add := func(at metav1.Time, format string, arguments ...any) {
		d.add(at, "record", r.Name, fmt.Sprintf(format, arguments...))
	}
	add(r.CreationTimestamp, "made for machine %s", r.Spec.Machine.Name)
	for _, former := range r.Status.EKHistory {
		add(former.Replaced, "EK %s was replaced", short(former.Fingerprint))
	}
	if replaced := r.Status.EKReplaced; replaced != nil {
		add(replaced.Since, "the EK is refused from now on: its source names %d others", len(replaced.EKs))
	}
	if at := r.Status.LastAttested; at != nil {
		add(*at, "evidence was accepted last")
	}
	if v := r.Status.Revocation; v != nil {
		add(v.Time, "certificates were revoked by %s: %s", v.Name, v.Reason)
	}
	if s := r.Status.Suspension; s != nil {
		add(s.Time, "the machine was suspended: %s", s.Reason)
	}
}

func (d *Description) addRequest(r *Request) {
	kind := "proof"
	if r.hello {
		kind = "hello"
	}
	claimed := ""
	if ek := r.fingerprint(); ek != "" {
		claimed = " with EK " + short(ek)
	}
	d.add(r.Created, "request", r.Name, kind+" filed by "+r.Requester+claimed)
	why := r.Reason
	if r.Message != "" {
		why += ": " + r.Message
	}
	switch {
	case !r.Since.IsZero():
		d.add(r.Since, "request", r.Name, r.State+": "+why)
	case r.State == state.Pending.String() && why != "":
		d.add(r.Created, "request", r.Name, "waits: "+why)
	}
}

func (i *invocation) printDescription(d *Description, format string) error {
	i.warnIncomplete(d.Incomplete, 0)
	if format != "" {
		return i.print(format, d)
	}
	var out strings.Builder
	line := func(name, format string, arguments ...any) {
		_, _ = fmt.Fprintf(&out, "%-13s %s\n", name+":", text.Line(fmt.Sprintf(format, arguments...), maxMessage))
	}
	line("Node", "%s", d.Node)
	if len(d.Records) == 0 {
		line("Record", "<none>")
	}
	for k := range d.Records {
		d.printRecord(&d.Records[k], line, i.now)
	}
	out.WriteString("History:\n")
	if d.Omitted > 0 {
		_, _ = fmt.Fprintf(&out, "  (%d older ones are not shown)\n", d.Omitted)
	}
	width := 0
	for _, h := range d.History {
		width = max(width, len(h.Name))
	}
	for _, h := range d.History {
		_, _ = fmt.Fprintf(&out, "  %s  %-7s  %-*s  %s\n", h.Time.UTC().Format(time.RFC3339), h.From, width, h.Name, text.Line(h.What, maxMessage))
	}
	_, err := i.Stdout.Write([]byte(out.String()))
	return err
}

func (d *Description) printRecord(r *v1alpha1.NodeAttestation, line func(name, format string, arguments ...any), now time.Time) {
	line("Record", "%s/%s", r.Namespace, r.Name)
	line("Machine", "%s (%s)", r.Spec.Machine.Name, r.Spec.Machine.Source)
	if r.Spec.ProviderID != "" {
		line("Provider ID", "%s", r.Spec.ProviderID)
	}
	line("Provider", "%s", r.Spec.Provider)
	if ek := r.Spec.EK; ek != nil {
		source := "no source"
		if ek.Source != "" {
			source = ek.Source
		}
		line("EK", "%s (%s, named by %s)", ek.Fingerprint, ek.Template, source)
	}
	if at := r.Status.LastAttested; at != nil {
		line("Attested", "%s (%s ago)", at.UTC().Format(time.RFC3339), age(at.Time, now))
	}
	if s := r.Status.Suspension; s != nil {
		line("Suspended", "since %s: %s", stamp(s.Time.Time), s.Reason)
	}
	if v := r.Status.Revocation; v != nil {
		line("Revoked", "last at %s by %s: %s", stamp(v.Time.Time), v.Name, v.Reason)
	}
	for _, c := range r.Status.Certificates {
		more := ""
		if c.FormerEK {
			more = ", of a former EK"
		}
		if c.Recovered() {
			more += ", or earlier: the record was recreated for it"
		}
		if c.Revoked {
			more += ", revoked"
		}
		line("Certificate", "%s until %s (%s)%s", short(c.SHA256), c.NotAfter.UTC().Format(time.RFC3339), until(c.NotAfter.Time, now), more)
	}
}
