// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

const (
	// fieldListCluster selects RevocationSlices.
	fieldListCluster = "spec.cluster"
	// overlay switches the feature on.
	overlay = "packaging/kubernetes-revocation"
	// maxReason is how many characters a reason has at most, by the CRDs.
	maxReason = 256
	// checkInterval is the plugin's default for its setting of that name.
	checkInterval = 15 * time.Minute
)

// revocationKinds are the kinds of the overlay.
var revocationKinds = []string{"NodeRevocation", "NodeSuspension", "RevocationSlice"}

// lacksRevocation reports whether an error says that the cluster does not have these kinds.
func lacksRevocation(err error) bool {
	var kind *meta.NoKindMatchError
	return errors.As(err, &kind) && slices.Contains(revocationKinds, kind.GroupKind.Kind)
}

// checkReason checks the flag --reason by the rules of the CRDs.
func checkReason(reason string) error {
	switch n := utf8.RuneCountInString(reason); {
	case strings.TrimSpace(reason) == "":
		return usage(errors.New("--reason is required: it goes to the records, Events and the decision log"))
	case n > maxReason:
		return usage(fmt.Errorf("--reason has %d characters: at most %d are allowed", n, maxReason))
	case !utf8.ValidString(reason) || strings.ContainsFunc(reason, func(r rune) bool { return !unicode.IsPrint(r) }):
		return usage(errors.New("--reason has characters that are not printable"))
	}
	return nil
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
	// refused has the names of the nodes on a list with a policy. current has the fingerprints of
	// the current certificates on lists.
	refused, current map[string]bool
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
		options = append(options, client.MatchingFields{fieldListCluster: cluster})
	}
	l := &Lists{
		Capacity: revocation.PolicyCount * revocation.SliceCapacity, entries: map[string]v1alpha1.RevokedCertificate{}, refused: map[string]bool{}, current: map[string]bool{},
	}
	err := readPages(ctx, a.records, func() *v1alpha1.RevocationSliceList { return &v1alpha1.RevocationSliceList{} },
		func(page *v1alpha1.RevocationSliceList) {
			for i := range page.Items {
				for _, c := range page.Items[i].Spec.Current {
					l.current[c.SHA256] = true
				}
				for _, c := range page.Items[i].Spec.Certificates {
					l.entries[c.SHA256] = c
					if page.Items[i].Spec.Number <= revocation.PolicyCount {
						l.refused[c.NodeName] = true
						l.places++
					}
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
	err := readPages(ctx, a.records, func() *v1alpha1.NodeSuspensionList { return &v1alpha1.NodeSuspensionList{} },
		func(page *v1alpha1.NodeSuspensionList) {
			for i := range page.Items {
				all[page.Items[i].Spec.EK] = &page.Items[i]
			}
		}, client.InNamespace(a.namespace))
	return all, err
}

// readRevocations returns the revocations of a cluster, the newest first.
func (a *access) readRevocations(ctx context.Context, cluster string) (all []v1alpha1.NodeRevocation, err error) {
	err = readPages(ctx, a.records, func() *v1alpha1.NodeRevocationList { return &v1alpha1.NodeRevocationList{} },
		func(page *v1alpha1.NodeRevocationList) {
			for i := range page.Items {
				if page.Items[i].Spec.Cluster == cluster {
					all = append(all, page.Items[i])
				}
			}
		}, client.InNamespace(a.namespace))
	slices.SortStableFunc(all, func(a, b v1alpha1.NodeRevocation) int { return b.CreationTimestamp.Compare(a.CreationTimestamp.Time) })
	return all, err
}

// clusterOf returns the cluster's UID. The records have it.
func (a *access) clusterOf(records []v1alpha1.NodeAttestation) (string, error) {
	var all []string
	for i := range records {
		all = append(all, records[i].Spec.Cluster)
	}
	slices.Sort(all)
	switch all = slices.Compact(all); len(all) {
	case 0:
		where := "namespace " + a.namespace
		if a.cluster != "" {
			where += ", cluster " + a.cluster
		}
		return "", &failure{codeNotFound, "see kubectl attest status, --namespace and --workload-cluster", fmt.Errorf("%s: there are no records", where)}
	case 1:
		return all[0], nil
	}
	return "", usage(fmt.Errorf("the records are of several clusters: %s", text.Names(all)))
}

// objectMeta returns the metadata of an object that a command creates.
func (a *access) objectMeta() metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: a.namespace}
	if a.cluster != "" {
		m.Labels = map[string]string{clusterv1.ClusterNameLabel: a.cluster}
	}
	return m
}

// nodeState is what a plan needs to know of a Node.
type nodeState struct {
	ready bool
	// reports says that the node reports its certificate. So its plugin looks for announcements.
	reports bool
}

// If there are more than manyNodes nodes, all Nodes are listed instead of read one by one.
const manyNodes = 20

// readNodes returns the Nodes of these names.
func (a *access) readNodes(ctx context.Context, names []string) (map[string]nodeState, error) {
	states := map[string]nodeState{}
	add := func(node *corev1.Node) {
		_, reports := node.Annotations[attestation.AnnotationCertificate]
		states[node.Name] = nodeState{isReady(node), reports}
	}
	if len(names) > manyNodes {
		err := readPages(ctx, a.nodes, func() *corev1.NodeList { return &corev1.NodeList{} }, func(page *corev1.NodeList) {
			for i := range page.Items {
				add(&page.Items[i])
			}
		})
		return states, err
	}
	for _, name := range names {
		node := &corev1.Node{}
		if err := a.nodes.Get(ctx, client.ObjectKey{Name: name}, node); err == nil {
			add(node)
		} else if client.IgnoreNotFound(err) != nil {
			return nil, reached(err)
		}
	}
	return states, nil
}

func isReady(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// planText collects the lines of a plan. Peers may have written parts of them.
type planText struct{ strings.Builder }

func (p *planText) line(format string, arguments ...any) {
	_, _ = fmt.Fprintln(p, text.Line(sprintf(format, arguments...), maxMessage))
}

func (p *planText) item(format string, arguments ...any) {
	_, _ = fmt.Fprintf(p, "  - ")
	p.line(format, arguments...)
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

// addLimits says what no admission policy can refuse.
func (p *planText) addLimits() {
	p.item("an admission policy refuses writes. It cannot refuse reads, watches that are open, and tokens that the node requested before for its pods")
}

// stamp formats a time for people.
func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// plainDuration formats a duration without parts that are zero, such as 2h.
func plainDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
