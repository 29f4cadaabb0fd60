// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// Description is the output of the command describe.
type Description struct {
	Node    string                     `json:"node"`
	Records []v1alpha1.NodeAttestation `json:"records"`
	// History has the record's entries, and then the entries that others claim, each in the order
	// of time.
	History []Happening `json:"history"`
	// Omitted counts the older requests and Events that are not in History.
	Omitted    Omitted  `json:"omitted,omitzero"`
	Incomplete []string `json:"incomplete,omitempty"`

	// elsewhere has the nodes of other records, by their endorsement keys. inventory is nil if it
	// cannot be read.
	elsewhere map[string]string
	inventory *inventory.Inventory
}

// Omitted counts what is not shown.
type Omitted struct {
	Requests int `json:"requests,omitempty"`
	Events   int `json:"events,omitempty"`
}

// Happening is an entry of a node's history.
type Happening struct {
	Time metav1.Time `json:"time"`
	// Trusted says that the entry comes from the record, which only the controller and operators
	// write. A bootstrap token can file requests about any node, and each node can create Events.
	Trusted bool `json:"trusted"`
	// From is the kind of object that the entry comes from: record, request or event. Name is the
	// name of that object.
	From string `json:"from"`
	Name string `json:"name"`
	What string `json:"what"`
}

const (
	fromRecord, fromRequest, fromEvent = "record", "request", "event"
	// maxHistory limits the requests in a history, and also the Events. The CRD bounds the record.
	maxHistory = 100
)

func (i *invocation) describeCommand() *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:   "describe NODE",
		Short: "Show the record of a node, and what happened to it by record, requests and Events",
		Long: `Show the record of a node, and what happened to it in the order of time. History is what the record says: only the controller and operators
write it. Claims are requests that claim the node's name, and Events. Anyone with a bootstrap token can file such a request, and any node
can create such an Event: do not act on a claim alone. Requests and Events vanish after an hour.`,
		Example:           "  kubectl attest describe worker-7",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: i.completeNode,
		RunE: func(c *cobra.Command, args []string) error {
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
			return i.printDescription(d, format)
		},
	}
	outputFlag(c, &format)
	return c
}

func (a *access) describe(ctx context.Context, node string, now time.Time) (*Description, error) {
	all, err := a.readAllRecords(ctx)
	if err != nil {
		return nil, err
	}
	d := &Description{Node: node, Records: []v1alpha1.NodeAttestation{}, History: []Happening{}, elsewhere: map[string]string{}}
	for i := range all {
		if r := &all[i]; r.Spec.NodeName == node {
			d.Records = append(d.Records, *r)
		} else if r.Spec.EK != nil {
			d.elsewhere[r.Spec.EK.Fingerprint] = r.Spec.NodeName
		}
	}
	note := func(what string, err error) {
		if err != nil {
			d.Incomplete = append(d.Incomplete, sprintf("%s: %v", what, err))
		}
	}
	// Without it, only the machines of keys are missing. With Cluster API there may be none.
	if listed, err := a.readInventory(ctx); err == nil {
		d.inventory = listed
	}
	requests, err := a.readRequests(ctx, now)
	note("requests", err)
	events, err := readEvents(ctx, a.nodes, clusterEvents, now)
	note("Events", err)
	if len(d.Records) > 0 {
		more, err := readEvents(ctx, a.records, a.namespace, now)
		note("Events of the record", err)
		events = append(events, more...)
	}
	d.fill(requests, events)
	return d, nil
}

// clusterEvents is the namespace of Events on objects without a namespace.
const clusterEvents = "default"

// event is an Event that names the controller as its reporter. Nothing proves that: each node may
// create Events in any namespace, and an Event does not say who created it. RBAC cannot limit who
// uses the reporter's name. So an Event decides nothing. Texts are cut, but not escaped.
type event struct {
	kind, name, reason, note string
	at                       time.Time
}

// readEvents returns the controller's Events in a namespace, in no order.
func readEvents(ctx context.Context, c client.Client, namespace string, now time.Time, options ...client.ListOption) (all []event, err error) {
	options = append(options, client.InNamespace(namespace), client.MatchingFields{"reportingController": telemetry.Component})
	err = readEach(ctx, c, func(e *eventsv1.Event) { all = append(all, newEvent(e, now)) }, options...)
	return all, err
}

// newEvent uses the Event's own time of the last occurrence only if it lies between the creation of
// the Event and now.
func newEvent(e *eventsv1.Event, now time.Time) event {
	at := e.EventTime.Time
	if e.Series != nil {
		at = e.Series.LastObservedTime.Time
	}
	if at.Before(e.CreationTimestamp.Time) {
		at = e.CreationTimestamp.Time
	}
	if at.After(now) {
		at = now
	}
	return event{e.Regarding.Kind, e.Regarding.Name, text.Cut(e.Reason, maxName), text.Cut(e.Note, maxMessage), at}
}

// fill makes the history. Entries that anybody can write displace no entry of the record. Requests
// of one requester displace no request of another.
func (d *Description) fill(requests []Request, events []event) {
	about := map[string]bool{"Node/" + d.Node: true}
	for i := range d.Records {
		r := &d.Records[i]
		r.ManagedFields = nil
		about["NodeAttestation/"+r.Name] = true
		d.addRecord(r)
	}
	var claims []*Request
	for i := range requests {
		if r := &requests[i]; r.NodeName == d.Node {
			about["CertificateSigningRequest/"+r.Name] = true
			claims = append(claims, r)
		}
	}
	slices.Reverse(claims) // the newest first
	claims, d.Omitted.Requests = share(claims, maxHistory)
	for _, r := range slices.Backward(claims) {
		d.addRequest(r)
	}
	events = slices.DeleteFunc(events, func(e event) bool { return !about[e.kind+"/"+e.name] })
	slices.SortStableFunc(events, func(a, b event) int { return b.at.Compare(a.at) })
	d.Omitted.Events = max(0, len(events)-maxHistory)
	for _, e := range events[:len(events)-d.Omitted.Events] {
		d.add(metav1.NewTime(e.at), fromEvent, e.name, "%s", text.WithReason(e.reason, e.note))
	}
	slices.SortStableFunc(d.History, func(a, b Happening) int {
		return cmp.Or(trueFirst(a.Trusted, b.Trusted), a.Time.Compare(b.Time.Time))
	})
}

func (d *Description) add(at metav1.Time, from, name, format string, arguments ...any) {
	d.History = append(d.History, Happening{at, from == fromRecord, from, name, sprintf(format, arguments...)})
}

func (d *Description) addRecord(r *v1alpha1.NodeAttestation) {
	add := func(at metav1.Time, format string, arguments ...any) {
		d.add(at, fromRecord, r.Name, format, arguments...)
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
		add(v.Time, "certificates were revoked by %s: %s", v.Name, prose(v.Reason))
	}
	if s := r.Status.Suspension; s != nil {
		add(s.Time, "the machine was suspended: %s", prose(s.Reason))
	}
}

func (d *Description) addRequest(r *Request) {
	kind := "proof"
	if r.hello {
		kind = "hello"
	}
	if r.rehearsal {
		kind = "rehearsal's " + kind
	}
	filed := sprintf("%s filed by %s", kind, r.Requester)
	if ek := r.fingerprint(); ek != "" {
		filed += sprintf(" with EK %s", short(ek)) + d.ownersOf(ek)
	}
	d.History = append(d.History, Happening{r.Created, false, fromRequest, r.Name, filed})
	why := text.WithReason(r.Reason, r.Message)
	switch {
	case !r.Since.IsZero():
		d.add(r.Since, fromRequest, r.Name, "%s: %s", r.State, why)
	case r.judged:
		d.add(r.Created, fromRequest, r.Name, "verdict: %s", why)
	case r.State == state.Pending.String() && why != "":
		d.add(r.Created, fromRequest, r.Name, "waits: %s", why)
	}
}

// ownersOf says which other node's record has an EK, and which machines the inventory has it for.
func (d *Description) ownersOf(ek string) string {
	var out strings.Builder
	if node := d.elsewhere[ek]; node != "" {
		out.WriteString(sprintf(", which the record of node %s has", node))
	}
	for _, machine := range d.inventory.ByEK(ek) {
		if machine.NodeName != d.Node {
			out.WriteString(sprintf(", which the inventory has for machine %s, node %s", machine.Name, cmp.Or(machine.NodeName, "<none>")))
		}
	}
	return out.String()
}

func (i *invocation) printDescription(d *Description, format string) error {
	i.warnIncomplete(d.Incomplete, 0)
	if format != "" {
		return i.Print(format, d)
	}
	var out strings.Builder
	line := func(name, format string, arguments ...any) {
		_, _ = fmt.Fprintf(&out, "%-13s %s\n", name+":", sprintf(format, arguments...))
	}
	line("Node", "%s", d.Node)
	if len(d.Records) == 0 {
		line("Record", "<none>")
	}
	for k := range d.Records {
		d.printRecord(&d.Records[k], line, i.now)
	}
	d.printHistory(&out)
	_, err := io.WriteString(i.Stdout, out.String())
	return err
}

// printHistory prints the record's entries, and below them those that are not trusted.
func (d *Description) printHistory(out *strings.Builder) {
	width := 0
	for _, h := range d.History {
		width = max(width, len(sprintf("%s", h.Name)))
	}
	entries := func(trusted bool) {
		for _, h := range d.History {
			if h.Trusted == trusted {
				out.WriteString(sprintf("  %s  %-7s  %-*s  %s", stamp(h.Time.Time), h.From, width, h.Name, prose(h.What)) + "\n")
			}
		}
	}
	out.WriteString("History, by the record:\n")
	entries(true)
	if slices.ContainsFunc(d.History, func(h Happening) bool { return !h.Trusted }) {
		out.WriteString("Claims, by requests and Events (others than the controller can write them):\n")
	}
	if o := d.Omitted; o != (Omitted{}) {
		_, _ = fmt.Fprintf(out, "  (%d older requests and %d older Events are not shown)\n", o.Requests, o.Events)
	}
	entries(false)
}

func (d *Description) printRecord(r *v1alpha1.NodeAttestation, line func(name, format string, arguments ...any), now time.Time) {
	line("Record", "%s/%s", r.Namespace, r.Name)
	line("Machine", "%s (%s)", r.Spec.Machine.Name, r.Spec.Machine.Source)
	if r.Spec.ProviderID != "" {
		line("Provider ID", "%s", r.Spec.ProviderID)
	}
	line("Provider", "%s", r.Spec.Provider)
	if i := r.Spec.Instance; i != nil {
		line("Instance", "%s %s, account %s", i.Platform, i.ID, cmp.Or(i.Account, "not known"))
	}
	if ek := r.Spec.EK; ek != nil {
		details := "named by " + cmp.Or(ek.Source, "no source")
		if ek.Template != "" {
			details = ek.Template + ", " + details
		}
		line("EK", "%s (%s)", ek.Fingerprint, details)
	}
	if at := r.Status.LastAttested; at != nil {
		line("Attested", "%s (%s ago)", stamp(at.Time), age(at.Time, now))
	}
	if s := r.Status.Suspension; s != nil {
		line("Suspended", "since %s: %s", stamp(s.Time.Time), prose(s.Reason))
	}
	if v := r.Status.Revocation; v != nil {
		line("Revoked", "last at %s by %s: %s", stamp(v.Time.Time), v.Name, prose(v.Reason))
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
		line("Certificate", "%s until %s (%s)%s", short(c.SHA256), stamp(c.NotAfter.Time), until(c.NotAfter.Time, now), more)
	}
}
