// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// sumOf is a certificate's fingerprint.
func sumOf(n int) string { return fmt.Sprintf("%064x", 0xc0ffee000000+n) }

// issued is a certificate that was requested some time ago, and lives for a day.
func issued(n int, ago time.Duration) v1alpha1.IssuedCertificate {
	requested := before(ago)
	return v1alpha1.IssuedCertificate{SHA256: sumOf(n), NotAfter: before(ago - 24*time.Hour), Requested: &requested, RequestUID: "u"}
}

// attested is a record with certificates.
func attested(node string, ek byte, certificates ...v1alpha1.IssuedCertificate) *v1alpha1.NodeAttestation {
	r := newRecord(node, ek)
	r.Status.Certificates = certificates
	return r
}

// readyNode is a Node that is Ready, and reports its certificate.
func readyNode(name string) *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"pool": "a"}, Annotations: map[string]string{attestation.AnnotationCertificate: sumOf(0)},
	}}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	return node
}

// forced is the controller's Namespace with the condition.
func forced(status corev1.ConditionStatus) *corev1.Namespace {
	n := recordsNamespace()
	n.Status.Conditions = []corev1.NamespaceCondition{{Type: telemetry.ConditionRevocation, Status: status, Reason: "RevocationInForce", Message: "the writes of each revoked certificate are refused"}}
	return n
}

func listOf(number int32, certificates ...v1alpha1.RevokedCertificate) *v1alpha1.RevocationSlice {
	return &v1alpha1.RevocationSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: fmt.Sprintf("c-%d", number)},
		Spec:       v1alpha1.RevocationSliceSpec{Cluster: "c", Number: number, Certificates: certificates},
	}
}

func suspensionOf(ek byte, node string) *v1alpha1.NodeSuspension {
	return &v1alpha1.NodeSuspension{
		ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: "ek-" + ekOf(ek), UID: "uid-suspension", CreationTimestamp: before(time.Hour)},
		Spec:       v1alpha1.NodeSuspensionSpec{EK: ekOf(ek), NodeName: node, Reason: "stolen"},
	}
}

func podOn(node, name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID("uid-" + name)}, Spec: corev1.PodSpec{NodeName: node}}
}

// revocable is a cluster with the feature switched on: two nodes that are well, one that is away,
// and one whose machine is suspended.
func revocable() []client.Object {
	suspended := attested("worker-4", 4, issued(4, 4*time.Hour))
	suspended.Status.Certificates[0].Revoked = true
	suspended.Status.Suspension = &v1alpha1.AppliedSuspension{Reason: "stolen", Time: before(time.Hour)}
	meta.SetStatusCondition(&suspended.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionSuspended, Status: metav1.ConditionTrue})
	done := &v1alpha1.NodeRevocation{
		ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: "rotate-x2x5z", CreationTimestamp: before(30 * time.Minute)},
		Spec:       v1alpha1.NodeRevocationSpec{Cluster: "c", Nodes: []string{"worker-1", "worker-2"}, Mode: v1alpha1.RevokeAfterRenewal, Reason: "new key type"},
		Status:     v1alpha1.NodeRevocationStatus{Nodes: 2, Renewed: 1, Revoked: 1, Waiting: []string{"worker-2"}},
	}
	return []client.Object{
		forced(corev1.ConditionTrue), suspended, suspensionOf(4, "worker-4"), done,
		attested("worker-1", 1, issued(1, 20*time.Hour), issued(2, 2*time.Hour)), attested("worker-2", 2, issued(3, 3*time.Hour)), attested("worker-3", 3, issued(5, time.Hour)),
		readyNode("worker-1"), readyNode("worker-2"), readyNode("control-1"),
		podOn("worker-2", "web-0"), podOn("worker-2", "web-1"), podOn("worker-1", "db-0"),
		listOf(1, v1alpha1.RevokedCertificate{SHA256: sumOf(4), NotAfter: before(-20 * time.Hour), NodeName: "worker-4", EK: ekOf(4), Suspended: true}),
	}
}

// readOnly fails the test at each write.
func readOnly(t *testing.T, a *access) *access {
	c := interceptor.NewClient(a.records.(client.WithWatch), interceptor.Funcs{
		Create: func(_ context.Context, _ client.WithWatch, o client.Object, _ ...client.CreateOption) error {
			t.Errorf("it creates %T %s", o, o.GetName())
			return nil
		},
		Delete: func(_ context.Context, _ client.WithWatch, o client.Object, _ ...client.DeleteOption) error {
			t.Errorf("it deletes %T %s", o, o.GetName())
			return nil
		},
		Patch: func(_ context.Context, _ client.WithWatch, o client.Object, _ client.Patch, _ ...client.PatchOption) error {
			t.Errorf("it patches %T %s", o, o.GetName())
			return nil
		},
		Update: func(_ context.Context, _ client.WithWatch, o client.Object, _ ...client.UpdateOption) error {
			t.Errorf("it updates %T %s", o, o.GetName())
			return nil
		},
	})
	return &access{records: c, nodes: c, namespace: a.namespace, controllerNamespace: a.controllerNamespace, cluster: a.cluster}
}

// A dry run, and a command that nobody confirms, say what would happen and change nothing.
func TestRevocationPlans(t *testing.T) {
	for name, args := range map[string][]string{
		"revoke":        {"revoke", "worker-1", "worker-3", "--reason=disk was lost"},
		"revoke-all":    {"revoke", "--all", "--issued-before=2026-11-23T09:30:00Z", "--reason=an image had keys"},
		"rotate":        {"rotate", "--all", "--reason=CA rotation"},
		"rotate-labels": {"rotate", "-l", "pool=a", "--reason=new key type", "--spread=1h", "--limit=70m"},
		"suspend":       {"suspend", "worker-2", "--reason=stolen", "--evict"},
		"suspend-ek":    {"suspend", "--ek=" + ekOf(9), "--reason=sold"},
		"resume":        {"resume", "worker-4"},
	} {
		t.Run(name, func(t *testing.T) {
			a := readOnly(t, newAccess(t, revocable()...))
			dry := run(t, a, append(args, "--dry-run", "--yes")...)
			wantGolden(t, name+".txt", dry)
			shown := run(t, a, args...)
			shown.want(t, codeNotConfirmed, "nobody can confirm it", "hint: --yes")
			if plan, _, _ := strings.Cut(shown.stderr, Name+": "); plan+"Nothing was changed: --dry-run.\n" != dry.stdout {
				t.Errorf("another plan is confirmed than shown:\n%s", plan)
			}
			master, slave := openTerminal(t)
			if _, err := master.WriteString("no\n"); err != nil {
				t.Fatal(err)
			}
			var stderr bytes.Buffer
			program := Program{access: a, now: func() time.Time { return now }}
			if code := program.Run(t.Context(), Process{Args: args, Stdin: slave, Stdout: &stderr, Stderr: &stderr, Getenv: os.Getenv}); code != codeNotConfirmed {
				t.Errorf("exit code %d\n%s", code, stderr.String())
			}
		})
	}
}

func TestRevocationsAreShown(t *testing.T) {
	wantGolden(t, "revocations.txt", run(t, newAccess(t, revocable()...), "revocations"))
	wantGolden(t, "revocations.json", run(t, newAccess(t, revocable()...), "revocations", "-o", "json"))
	run(t, newAccess(t, revocable()...), "describe", "worker-4").want(t, 0, "Suspended:    since 2026-11-23T11:00:00Z: stolen", "(20h), revoked", "the machine was suspended: stolen")
}

// Wrong input is refused before anything happens.
func TestRevocationInput(t *testing.T) {
	many := make([]string, maxSelected+1)
	for i := range many {
		many[i] = fmt.Sprintf("n%d", i)
	}
	const reason = "--reason=r"
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"no reason":           {[]string{"revoke", "worker-1"}, codeUsage, "--reason is required"},
		"an empty reason":     {[]string{"revoke", "worker-1", "--reason= "}, codeUsage, "--reason is required"},
		"a long reason":       {[]string{"rotate", "worker-1", "--reason=" + strings.Repeat("é", 257)}, codeUsage, "257 characters"},
		"a hostile reason":    {[]string{"suspend", "worker-1", "--reason=a\x1b[2Jb"}, codeUsage, "not printable"},
		"a reversed reason":   {[]string{"revoke", "worker-1", "--reason=a\u202eb"}, codeUsage, "not printable"},
		"no UTF-8":            {[]string{"revoke", "worker-1", "--reason=a\xff"}, codeUsage, "not printable"},
		"nothing selected":    {[]string{"revoke", reason}, codeUsage, "name nodes, or say --all"},
		"a time alone":        {[]string{"revoke", "--issued-before=1h", reason}, codeUsage, "name nodes, or say --all"},
		"nodes and all":       {[]string{"revoke", "worker-1", "--all", reason}, codeUsage, "exclude each other"},
		"labels and all":      {[]string{"rotate", "-l", "a=b", "--all", reason}, codeUsage, "exclude each other"},
		"odd labels":          {[]string{"rotate", "-l", "a in", reason}, codeUsage, "--selector"},
		"labels of nobody":    {[]string{"rotate", "-l", "pool=z", reason}, codeNotFound, "no Node with the labels"},
		"too many":            {append([]string{"revoke", reason}, many...), codeUsage, "hint: --all selects all nodes"},
		"without a record":    {[]string{"revoke", "worker-1", "worker-7", reason}, codeNotFound, "these nodes have no record: 1: worker-7"},
		"a time in future":    {[]string{"revoke", "worker-1", "--issued-before=2026-11-23T12:00:01Z", reason}, codeUsage, "is in the future"},
		"no time":             {[]string{"revoke", "worker-1", "--issued-before=yesterday", reason}, codeUsage, "RFC 3339"},
		"a negative time":     {[]string{"revoke", "worker-1", "--issued-before=-1h", reason}, codeUsage, "RFC 3339"},
		"nothing is so old":   {[]string{"revoke", "worker-2", "--issued-before=20h", reason}, codeNotFound, "no certificate to revoke"},
		"all is revoked":      {[]string{"revoke", "worker-4", reason}, codeNotFound, "no certificate to revoke"},
		"a long spread":       {[]string{"rotate", "--all", "--spread=2h", reason}, codeUsage, "must be shorter than --limit"},
		"a negative spread":   {[]string{"rotate", "--all", "--spread=-1s", reason}, codeUsage, "--spread"},
		"no limit":            {[]string{"rotate", "--all", "--limit=0", reason}, codeUsage, "--limit"},
		"an endless limit":    {[]string{"rotate", "--all", "--limit=721h", reason}, codeUsage, "--limit"},
		"now and a limit":     {[]string{"rotate", "--all", "--now", "--limit=1h", reason}, codeUsage, "--now"},
		"a negative timeout":  {[]string{"revoke", "--all", "--timeout=-1s", reason}, codeUsage, "--timeout"},
		"suspend nobody":      {[]string{"suspend", reason}, codeUsage, "name a node, or say --ek"},
		"suspend no record":   {[]string{"suspend", "worker-7", reason}, codeNotFound, "hint: name the fingerprint"},
		"suspend another EK":  {[]string{"suspend", "worker-1", "--ek=" + ekOf(2), reason}, codeUsage, "has another endorsement key"},
		"no fingerprint":      {[]string{"suspend", "--ek=abc", reason}, codeUsage, "64 hex digits"},
		"no such record":      {[]string{"suspend", "worker-1", "--record=x", reason}, codeNotFound, "no record"},
		"evict without node":  {[]string{"suspend", "--ek=" + ekOf(2), "--evict", reason}, codeUsage, "--evict needs"},
		"evict at once":       {[]string{"suspend", "worker-1", "--evict", "--wait=false", reason}, codeUsage, "--wait=false"},
		"resume nobody":       {[]string{"resume"}, codeUsage, "name a node"},
		"resume a free one":   {[]string{"resume", "worker-1"}, codeNotFound, "no suspension is found"},
		"resume two":          {[]string{"resume", "worker-1", "--ek=" + ekOf(4)}, codeUsage, "exclude each other"},
		"resume an unknown":   {[]string{"resume", "--ek=" + ekOf(1)}, codeNotFound, "kubectl attest revocations"},
		"revocations of what": {[]string{"revocations", "x"}, codeUsage, "--help"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, readOnly(t, newAccess(t, revocable()...)), c.args...).want(t, c.code, c.says)
		})
	}
}

// created returns the only NodeRevocation that a command made.
func created(t *testing.T, a *access) *v1alpha1.NodeRevocation {
	t.Helper()
	all := &v1alpha1.NodeRevocationList{}
	if err := a.records.List(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	for i := range all.Items {
		if all.Items[i].Name != "rotate-x2x5z" {
			return &all.Items[i]
		}
	}
	t.Fatal("no NodeRevocation was created")
	return nil
}

func TestRevocationObjects(t *testing.T) {
	at := metav1.NewTime(time.Date(2026, 11, 23, 9, 30, 0, 0, time.UTC))
	for name, c := range map[string]struct {
		args []string
		want v1alpha1.NodeRevocationSpec
	}{
		"revoke":       {[]string{"revoke", "worker-2", "worker-1", "worker-2"}, v1alpha1.NodeRevocationSpec{Nodes: []string{"worker-1", "worker-2"}, Mode: v1alpha1.RevokeImmediately}},
		"revoke all":   {[]string{"revoke", "--all", "--issued-before=2026-11-23T10:30:00+01:00"}, v1alpha1.NodeRevocationSpec{All: true, IssuedBefore: &at, Mode: v1alpha1.RevokeImmediately}},
		"rounded up":   {[]string{"revoke", "--all", "--issued-before=2h30m0.5s"}, v1alpha1.NodeRevocationSpec{All: true, IssuedBefore: &at, Mode: v1alpha1.RevokeImmediately}},
		"rotate":       {[]string{"rotate", "--all"}, v1alpha1.NodeRevocationSpec{All: true, Mode: v1alpha1.RevokeAfterRenewal, SpreadSeconds: new(int32(600)), LimitSeconds: new(int32(7200))}},
		"rotate some":  {[]string{"rotate", "-l", "pool=a", "--spread=1.5s", "--limit=3s"}, v1alpha1.NodeRevocationSpec{Nodes: []string{"worker-1", "worker-2"}, Mode: v1alpha1.RevokeAfterRenewal, SpreadSeconds: new(int32(2)), LimitSeconds: new(int32(3))}},
		"rotate --now": {[]string{"rotate", "worker-1", "--now"}, v1alpha1.NodeRevocationSpec{Nodes: []string{"worker-1"}, Mode: v1alpha1.RevokeImmediately}},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAccess(t, revocable()...)
			run(t, a, append(c.args, "--reason=because", "--yes", "--wait=false")...).want(t, 0, "NodeRevocation r", "created")
			object := created(t, a)
			c.want.Cluster, c.want.Reason = "c", "because"
			if got := object.Spec; fmt.Sprint(got.Nodes, got.All, got.Mode, got.Cluster, got.Reason) != fmt.Sprint(c.want.Nodes, c.want.All, c.want.Mode, c.want.Cluster, c.want.Reason) ||
				!got.IssuedBefore.Equal(c.want.IssuedBefore) || !same(got.SpreadSeconds, c.want.SpreadSeconds) || !same(got.LimitSeconds, c.want.LimitSeconds) {
				t.Errorf("%+v", got)
			}
			if object.Namespace != defaultNamespace || len(object.Labels) != 0 || !strings.HasPrefix(object.Name, map[v1alpha1.RevocationMode]string{v1alpha1.RevokeImmediately: "revoke-", v1alpha1.RevokeAfterRenewal: "rotate-"}[c.want.Mode]) {
				t.Errorf("%+v", object.ObjectMeta)
			}
		})
	}
}

func same(a, b *int32) bool { return (a == nil) == (b == nil) && (a == nil || *a == *b) }

// With Cluster API the objects are the Cluster's.
func TestRevocationOfACluster(t *testing.T) {
	one, other := attested("worker-1", 1, issued(1, time.Hour)), attested("worker-2", 2, issued(2, time.Hour))
	other.Spec.Cluster = "d"
	a := newAccess(t, one, other, forced(corev1.ConditionTrue), readyNode("worker-1"))
	run(t, a, "revoke", "--all", "--reason=r", "--yes").want(t, codeUsage, "of several clusters: 2: c, d")
	one.Labels, other.Labels = map[string]string{clusterv1.ClusterNameLabel: "one"}, map[string]string{clusterv1.ClusterNameLabel: "two"}
	a = newAccess(t, one, other, forced(corev1.ConditionTrue), readyNode("worker-1"))
	a.cluster = "one"
	run(t, a, "revoke", "--all", "--reason=r", "--yes", "--wait=false").want(t, 0, "requested before now", "1: worker-1")
	if r := created(t, a); r.Spec.Cluster != "c" || r.Labels[clusterv1.ClusterNameLabel] != "one" {
		t.Errorf("%+v", r)
	}
	run(t, a, "revoke", "worker-2", "--reason=r", "--yes").want(t, codeNotFound, "worker-2")
	a.cluster = "three"
	run(t, a, "revoke", "--all", "--reason=r", "--yes").want(t, codeNotFound, "cluster three: there are no records")
}

// An API server without the kinds has revocation switched off. What the controller does not enforce
// is recorded, and is no success.
func TestRevocationSwitchedOff(t *testing.T) {
	a := newAccess(t, revocable()...)
	a.records = interceptor.NewClient(a.records.(client.WithWatch), interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			for _, kind := range revocationKinds {
				if strings.HasSuffix(fmt.Sprintf("%T", list), "."+kind+"List") {
					return fmt.Errorf("failed to get restmapping: %w", &meta.NoKindMatchError{GroupKind: v1alpha1.GroupVersion.WithKind(kind).GroupKind(), SearchedVersions: []string{"v1alpha1"}})
				}
			}
			return c.List(ctx, list, options...)
		},
	})
	for _, args := range [][]string{
		{"revoke", "--all", "--reason=r"}, {"rotate", "worker-1", "--reason=r"}, {"suspend", "worker-1", "--reason=r"}, {"resume", "worker-1"}, {"revocations"},
	} {
		run(t, a, args...).want(t, codeNotFound, "revocation is switched off in this cluster", "hint: apply packaging/kubernetes-revocation")
	}
	if f := (&examination{access: a, now: now}).checkRevocation(t.Context()); f.Status != checkup.OK || !strings.Contains(f.Message, "switched off") {
		t.Errorf("%+v", f)
	}
	run(t, a, "reset", "worker-1", "--yes").want(t, 0, "do that before the reset: kubectl attest revoke worker-1")
	for name, namespace := range map[string]*corev1.Namespace{
		"is False": forced(corev1.ConditionFalse), "has no condition NodeAttestationRevocationInForce": {ObjectMeta: metav1.ObjectMeta{Name: defaultNamespace}},
	} {
		objects := revocable()
		objects[0] = namespace
		a := newAccess(t, objects...)
		run(t, a, "revoke", "worker-1", "--reason=r").want(t, codeNotConfirmed, "WARNING: this is recorded, and is NOT in force", name)
		run(t, a, "revoke", "worker-1", "--reason=r", "--yes", "--wait=false").want(t, codeNotInForce, "created", "it is recorded, and not in force", name)
		created(t, a)
	}
}

// act has the controller's part be played: after each duration a step runs.
func act(t *testing.T, a *access, steps map[time.Duration]func(context.Context)) {
	for after, step := range steps {
		go func() {
			select {
			case <-t.Context().Done():
			case <-time.After(after):
				step(t.Context())
			}
		}()
	}
}

// change changes an object.
func change[T client.Object](t *testing.T, c client.Client, object T, name string, do func(T)) {
	if err := c.Get(context.Background(), client.ObjectKey{Namespace: defaultNamespace, Name: name}, object); err != nil {
		t.Error(err)
		return
	}
	do(object)
	if err := c.Update(context.Background(), object); err != nil {
		t.Error(err)
	}
}

// revokes plays the controller's part: it puts certificates of a node on a list.
func revokes(t *testing.T, a *access, node string, certificates ...int) {
	change(t, a.records, &v1alpha1.RevocationSlice{}, "c-1", func(l *v1alpha1.RevocationSlice) {
		for _, n := range certificates {
			l.Spec.Certificates = append(l.Spec.Certificates, v1alpha1.RevokedCertificate{SHA256: sumOf(n), NotAfter: before(-time.Hour), NodeName: node})
		}
	})
}

// reports plays the controller's part: after the lists it writes the status of the revocation. The
// names are of the nodes that wait, at most 16 of them.
func reports(t *testing.T, a *access, nodes, renewed int, complete metav1.ConditionStatus, names ...string) {
	change(t, a.records, &v1alpha1.NodeRevocation{}, created(t, a).Name, func(r *v1alpha1.NodeRevocation) {
		r.Status.Number, r.Status.Nodes, r.Status.Renewed, r.Status.Waiting = 1, int32(nodes), int32(renewed), names[:min(len(names), 16)]
		meta.SetStatusCondition(&r.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionComplete, Status: complete, Reason: "R"})
	})
}

// renews plays the controller's part: nodes, which have records of these names, get a certificate
// after the revocation.
func renews(t *testing.T, a *access, nodes ...string) {
	for n, name := range nodes {
		change(t, a.records, &v1alpha1.NodeAttestation{}, name, func(r *v1alpha1.NodeAttestation) {
			newer := issued(5000+n, 0)
			newer.AfterRevocation = 1
			r.Status.Certificates = append(r.Status.Certificates, newer)
		})
	}
}

// isReadyAs is of a Node, whose status is a resource of its own.
func isReadyAs(t *testing.T, a *access, name string, status corev1.ConditionStatus) {
	node := &corev1.Node{}
	if err := a.nodes.Get(context.Background(), client.ObjectKey{Name: name}, node); err != nil {
		t.Error(err)
		return
	}
	node.Status.Conditions[0].Status = status
	if err := a.nodes.Status().Update(context.Background(), node); err != nil {
		t.Error(err)
	}
}

// bubble runs a command while the controller and the nodes do their part. The time is virtual.
func bubble(t *testing.T, objects []client.Object, steps func(t *testing.T, a *access) map[time.Duration]func(context.Context), check func(t *testing.T, a *access, r result, took time.Duration), args ...string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		a := newAccess(t, objects...)
		act(t, a, steps(t, a))
		begin := time.Now()
		r := run(t, a, args...)
		check(t, a, r, time.Since(begin))
	})
}

type script = map[time.Duration]func(context.Context)

// The progress ends when every node is back: its old certificates are revoked, it has a new one,
// and it is Ready. Nodes that were away before are not waited for, but their certificates are.
func TestRevokeWaits(t *testing.T) {
	bubble(t, revocable(), func(t *testing.T, a *access) script {
		return script{
			time.Second: func(context.Context) {
				revokes(t, a, "worker-1", 1, 2)
				isReadyAs(t, a, "worker-1", corev1.ConditionFalse)
			},
			20 * time.Second: func(context.Context) {
				revokes(t, a, "worker-3", 5)
				reports(t, a, 2, 0, metav1.ConditionFalse, "worker-1", "worker-3")
			},
			// Ready, and without a newer certificate: its Node is not up to date
			30 * time.Second: func(context.Context) { isReadyAs(t, a, "worker-1", corev1.ConditionTrue) },
			35 * time.Second: func(context.Context) { isReadyAs(t, a, "worker-1", corev1.ConditionFalse) },
			40 * time.Second: func(context.Context) { reports(t, a, 2, 1, metav1.ConditionFalse, "worker-3") },
			60 * time.Second: func(context.Context) { isReadyAs(t, a, "worker-1", corev1.ConditionTrue) },
		}
	}, func(t *testing.T, _ *access, r result, took time.Duration) {
		r.want(t, 0, "waiting for the revocation, and for 1 node to come back", "0 of 3 certificates revoked, 0 of 1 nodes back; waiting for 2: worker-1, worker-3",
			"2 of 3 certificates revoked, 0 of 1 nodes back; waiting for 2: worker-1, worker-3", "3 of 3 certificates revoked, 0 of 1 nodes back; waiting for 1: worker-1", "3 certificates revoked, 1 node back after 1m")
		if took < time.Minute || took > time.Minute+lastPoll {
			t.Errorf("it took %v", took)
		}
		if n := strings.Count(r.stderr, "certificates revoked"); n != 4 {
			t.Errorf("%d lines of progress:\n%s", n, r.stderr)
		}
	}, "revoke", "worker-1", "worker-3", "--reason=r", "--yes")
}

// With a rotation a node is back once the old certificate is revoked, too, though it stays Ready.
func TestRotateWaits(t *testing.T) {
	// The controller decides which certificate is newer. Being revoked does not make a node back.
	for name, steps := range map[string]func(t *testing.T, a *access) script{
		"renewed, then revoked": func(t *testing.T, a *access) script {
			return script{
				time.Second:      func(context.Context) { reports(t, a, 1, 0, metav1.ConditionFalse, "worker-2") },
				10 * time.Minute: func(context.Context) { reports(t, a, 1, 1, metav1.ConditionFalse) },
				12 * time.Minute: func(context.Context) {
					revokes(t, a, "worker-2", 3)
					reports(t, a, 1, 1, metav1.ConditionTrue)
				},
			}
		},
		"revoked, then renewed": func(t *testing.T, a *access) script {
			return script{
				time.Minute: func(context.Context) {
					revokes(t, a, "worker-2", 3)
					reports(t, a, 1, 0, metav1.ConditionFalse, "worker-2")
				},
				12 * time.Minute: func(context.Context) { reports(t, a, 1, 1, metav1.ConditionTrue) },
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, revocable(), steps, func(t *testing.T, _ *access, r result, took time.Duration) {
				r.want(t, 0, "1 certificate revoked, 1 node back after 12m")
				if took < 12*time.Minute || took > 13*time.Minute {
					t.Errorf("it took %v", took)
				}
			}, "rotate", "worker-2", "--reason=r", "--yes")
		})
	}
	// A node that was away before keeps the revocation from being complete, and the command does
	// not wait for it. It waits until the old certificate of the other one is revoked.
	bubble(t, revocable(), func(t *testing.T, a *access) script {
		return script{
			10 * time.Minute: func(context.Context) { reports(t, a, 2, 1, metav1.ConditionFalse, "worker-3") },
			12 * time.Minute: func(context.Context) { revokes(t, a, "worker-2", 3) },
		}
	}, func(t *testing.T, _ *access, r result, took time.Duration) {
		r.want(t, 0, "0 of 2 certificates revoked, 0 of 1 nodes back; waiting for 1: worker-2", "1 certificate revoked, 1 node back after 12m")
		if took < 12*time.Minute || took > 13*time.Minute {
			t.Errorf("it took %v", took)
		}
	}, "rotate", "worker-2", "worker-3", "--reason=r", "--yes")
}

// What ends a wait early says how far it has come, and that the revocation goes on.
func TestRevokeStopsWaiting(t *testing.T) {
	none := func(*testing.T, *access) script { return nil }
	bubble(t, revocable(), none, func(t *testing.T, a *access, r result, took time.Duration) {
		r.want(t, codeTimeout, "after 1m30s: the revocation revoke-", "goes on; 0 of 1 nodes are back, waiting for 1: worker-2", "hint: look again: kubectl attest revocations")
		if took != 90*time.Second {
			t.Errorf("it took %v", took)
		}
		created(t, a)
	}, "revoke", "worker-2", "--reason=r", "--yes", "--timeout=90s")
	// The default of a rotation is an hour after its limit.
	bubble(t, revocable(), none, func(t *testing.T, _ *access, r result, took time.Duration) {
		r.want(t, codeTimeout, "goes on")
		if took != 4*time.Hour {
			t.Errorf("it took %v", took)
		}
	}, "rotate", "worker-2", "--reason=r", "--yes", "--limit=3h")
	bubble(t, revocable(), func(t *testing.T, a *access) script {
		return script{time.Minute: func(ctx context.Context) {
			if err := a.records.Delete(ctx, created(t, a)); err != nil {
				t.Error(err)
			}
		}}
	}, func(t *testing.T, _ *access, r result, took time.Duration) {
		r.want(t, codeNotFound, "was deleted: the rest is not revoked")
		if took > 2*time.Minute {
			t.Errorf("it took %v", took)
		}
	}, "revoke", "worker-2", "--reason=r", "--yes")
	synctest.Test(t, func(t *testing.T) { // Ctrl-C
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var out bytes.Buffer
		program := Program{access: newAccess(t, revocable()...), now: func() time.Time { return now }}
		code := program.Run(ctx, Process{Args: []string{"revoke", "worker-2", "--reason=r", "--yes"}, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &out, Getenv: os.Getenv})
		result{code, out.String(), ""}.want(t, codeTimeout, "interrupted: the revocation revoke-", "goes on")
	})
}

// A certificate whose record is deleted is revoked if a list has it. Otherwise the command says
// that it is not. It does not wait for a node without a record, whether it has a Node or not.
func TestRevokeWithoutRecord(t *testing.T) {
	removed := func(t *testing.T, a *access, listed ...int) script {
		return script{10 * time.Second: func(ctx context.Context) {
			r := &v1alpha1.NodeAttestation{ObjectMeta: metav1.ObjectMeta{Namespace: a.namespace, Name: "worker-2"}}
			if err := a.records.Delete(ctx, r); err != nil {
				t.Error(err)
			}
			revokes(t, a, "worker-2", listed...)
			reports(t, a, 0, 0, metav1.ConditionTrue) // the controller does not know the node
		}}
	}
	bubble(t, revocable(), func(t *testing.T, a *access) script { return removed(t, a) }, func(t *testing.T, _ *access, r result, _ time.Duration) {
		r.want(t, codeNotInForce, "0 certificates revoked, 0 nodes back", "NOT revoked: 1 certificate, whose records were deleted meanwhile; nodes: 1: worker-2", "hint: once these nodes have records again")
	}, "revoke", "worker-2", "--reason=r", "--yes")
	for name, happens := range map[string]func(t *testing.T, a *access){
		"Node Ready":     func(*testing.T, *access) {},
		"Node not Ready": func(t *testing.T, a *access) { isReadyAs(t, a, "worker-2", corev1.ConditionFalse) },
		"no Node": func(t *testing.T, a *access) {
			if err := a.nodes.Delete(t.Context(), readyNode("worker-2")); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, revocable(), func(t *testing.T, a *access) script {
				steps := removed(t, a, 3)
				steps[5*time.Second] = func(context.Context) { happens(t, a) }
				return steps
			}, func(t *testing.T, _ *access, r result, took time.Duration) {
				r.want(t, 0, "1 certificate revoked, 0 nodes back", "their records were deleted meanwhile: 1: worker-2")
				if took > time.Minute {
					t.Errorf("it took %v", took)
				}
			}, "revoke", "worker-2", "--reason=r", "--yes")
		})
	}
}

// The controller moves certificates between lists, so one look can miss a certificate that is on a
// list. The command says that a certificate is not revoked only if two looks agree.
func TestRevokeLooksTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAccess(t, revocable()...)
		var moved atomic.Bool
		act(t, a, script{20 * time.Second: func(context.Context) {
			revokes(t, a, "worker-2", 3)
			reports(t, a, 1, 1, metav1.ConditionTrue)
			moved.Store(true)
		}})
		lossy := *a
		lossy.records = interceptor.NewClient(a.records.(client.WithWatch), interceptor.Funcs{
			List: func(ctx context.Context, w client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
				if _, ok := list.(*v1alpha1.RevocationSliceList); ok && moved.CompareAndSwap(true, false) {
					return nil
				}
				return w.List(ctx, list, options...)
			},
		})
		run(t, &lossy, "revoke", "worker-2", "--reason=r", "--yes").want(t, 0, "waiting for 1: worker-2", "1 certificate revoked, 1 node back")
	})
}

// An API server that is away for a while does not end the wait. A right that is missing does.
func TestWaitSurvivesErrors(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		code int
		says string
	}{
		"away":      {errors.New("connection refused\x1b[2J"), 0, "warning: trying again: connection refused\\u001b[2J"},
		"forbidden": {apierrors.NewForbidden(v1alpha1.Resource.GroupResource(), "x", errors.New("no")), codeAPIRefused, "hint: the rights are in"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				a := newAccess(t, revocable()...)
				inner := a.records
				act(t, a, script{
					time.Second:      func(context.Context) { revokes(t, a, "worker-2", 3) },
					20 * time.Second: func(context.Context) { reports(t, a, 1, 1, metav1.ConditionTrue) },
				})
				broken := *a
				broken.records = interceptor.NewClient(inner.(client.WithWatch), interceptor.Funcs{
					Get: func(ctx context.Context, w client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
						if since := time.Since(begin); since > 3*time.Second && since < 15*time.Second {
							return c.err
						}
						return w.Get(ctx, key, object, options...)
					},
				})
				run(t, &broken, "revoke", "worker-2", "--reason=r", "--yes").want(t, c.code, c.says)
				time.Sleep(time.Minute)
			})
		})
	}
}

// More nodes than are read one by one, and than the status names.
func TestRevokeManyNodes(t *testing.T) {
	objects := []client.Object{forced(corev1.ConditionTrue), listOf(1)}
	var names, away []string
	for i := range manyNodes + 30 {
		name := fmt.Sprintf("worker-%02d", i)
		names = append(names, name)
		objects = append(objects, attested(name, 1, issued(i, time.Hour)), readyNode(name))
	}
	for i := range 20 {
		name := fmt.Sprintf("away-%02d", i)
		away = append(away, name)
		objects = append(objects, attested(name, 2, issued(100+i, time.Hour)))
	}
	bubble(t, objects, func(t *testing.T, a *access) script {
		return script{
			20 * time.Second: func(context.Context) {
				for i, name := range names {
					revokes(t, a, name, i)
				}
				for i, name := range away {
					revokes(t, a, name, 100+i)
				}
				reports(t, a, 70, 0, metav1.ConditionFalse, append(slices.Clone(away), names...)...)
			},
			40 * time.Second: func(context.Context) {
				renews(t, a, names[:48]...)
				reports(t, a, 70, 48, metav1.ConditionFalse, append(slices.Clone(away), names[48:]...)...)
			},
			60 * time.Second: func(context.Context) {
				renews(t, a, names[48:]...)
				reports(t, a, 70, 50, metav1.ConditionFalse, away...)
			},
		}
	}, func(t *testing.T, _ *access, r result, took time.Duration) {
		r.want(t, 0, "0 of 70 certificates revoked, 0 of 50 nodes back; waiting for 70: away-00", "and 50 more",
			"70 of 70 certificates revoked, 0 of 50 nodes back; waiting for 50: worker-00", "48 of 50 nodes back; waiting for 2: worker-48, worker-49", "70 certificates revoked, 50 nodes back")
		if took < time.Minute || took > time.Minute+lastPollMany {
			t.Errorf("it took %v", took)
		}
	}, "revoke", "--all", "--reason=r", "--yes")
	bubble(t, objects, func(t *testing.T, a *access) script {
		return script{time.Second: func(context.Context) {
			for i, name := range names {
				revokes(t, a, name, i)
			}
			renews(t, a, names[:25]...)
			reports(t, a, 50, 25, metav1.ConditionFalse, names[25:]...)
		}}
	}, func(t *testing.T, _ *access, r result, _ time.Duration) {
		r.want(t, codeTimeout, "25 of 50 nodes are back, waiting for 25: worker-25")
	}, append(append([]string{"revoke"}, names...), "--reason=r", "--yes", "--timeout=1m")...)
}

// The status names 16 nodes. If these are nodes that the command does not wait for, it still waits
// for the others. Neither a newer certificate of further nodes nor one in another record of the
// same node ends the wait.
func TestRevokeWaitsForUnnamedNodes(t *testing.T) {
	objects := []client.Object{forced(corev1.ConditionTrue), listOf(1), attested("worker", 1, issued(0, time.Hour)), readyNode("worker")}
	again := attested("worker", 1, issued(1, time.Hour))
	again.Name = "worker-again"
	objects = append(objects, again)
	var away []string
	for i := range 20 {
		away = append(away, fmt.Sprintf("away-%02d", i))
		objects = append(objects, attested(away[i], 2, issued(100+i, time.Hour)))
	}
	bubble(t, objects, func(t *testing.T, a *access) script {
		return script{
			20 * time.Second: func(context.Context) {
				revokes(t, a, "worker", 0, 1)
				for i, name := range away {
					revokes(t, a, name, 100+i)
				}
				renews(t, a, append(slices.Clone(away[16:]), again.Name)...)
				reports(t, a, 22, 5, metav1.ConditionFalse, append(slices.Clone(away[:16]), "worker")...)
			},
			60 * time.Second: func(context.Context) {
				renews(t, a, "worker")
				reports(t, a, 22, 6, metav1.ConditionFalse, away[:16]...)
			},
		}
	}, func(t *testing.T, _ *access, r result, took time.Duration) {
		r.want(t, 0, "22 of 22 certificates revoked, 0 of 1 nodes back; waiting for 1: worker", "22 certificates revoked, 1 node back")
		if took < time.Minute || took > time.Minute+lastPollMany {
			t.Errorf("it took %v", took)
		}
	}, "revoke", "--all", "--reason=r", "--yes")
}

// A node that reports no certificate may not come back soon.
func TestPlanSaysWhoIsSilent(t *testing.T) {
	objects := revocable()
	for _, o := range objects {
		if n, ok := o.(*corev1.Node); ok && n.Name == "worker-2" {
			n.Annotations = nil
		}
	}
	run(t, newAccess(t, objects...), "revoke", "worker-1", "worker-2", "--reason=r", "--dry-run").
		want(t, 0, "these get a new certificate with their TPM, without a token: 1: worker-1", "these do not report their certificate: 1: worker-2")
}

// Many revocations are not printed whole, the newest come first, and those of another cluster are
// not shown.
func TestRevocationsAreBounded(t *testing.T) {
	objects := revocable()
	for n := range maxRevocations + 5 {
		objects = append(objects, &v1alpha1.NodeRevocation{
			ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: fmt.Sprintf("old-%03d", n), CreationTimestamp: before(24*time.Hour + time.Duration(n)*time.Minute)},
			Spec:       v1alpha1.NodeRevocationSpec{Cluster: "c", All: true, Mode: v1alpha1.RevokeImmediately, Reason: "r"},
		})
	}
	other := objects[len(objects)-1].DeepCopyObject().(*v1alpha1.NodeRevocation)
	other.Name, other.Spec.Cluster, other.CreationTimestamp = "other", "d", before(0)
	r := run(t, newAccess(t, append(objects, other)...), "revocations")
	r.want(t, 0, "rotate-x2x5z", "old-000", "old-098", "warning: 6 more are not shown")
	if strings.Contains(r.stdout, "old-099") || strings.Contains(r.stdout, "other") {
		t.Errorf("%s", r.stdout)
	}
}

// A reset says what stays of a revocation and of a suspension.
func TestResetAfterRevocation(t *testing.T) {
	run(t, newAccess(t, revocable()...), "reset", "worker-4").
		want(t, codeNotConfirmed, "its certificate 000000000000 is revoked, and stays so", "the machine stays suspended, under each node name: kubectl attest resume worker-4")
}

// Lists that are full are said before anything is revoked.
func TestPlanSaysListsAreFull(t *testing.T) {
	objects := revocable()
	next := 10000
	for number := int32(1); number <= revocation.PolicyCount; number++ {
		l := listOf(number)
		for range revocation.SliceCapacity {
			l.Spec.Certificates = append(l.Spec.Certificates, v1alpha1.RevokedCertificate{SHA256: sumOf(next), NotAfter: before(-time.Hour), NodeName: "n"})
			next++
		}
		objects = slices.DeleteFunc(objects, func(o client.Object) bool { return o.GetName() == l.Name })
		objects = append(objects, l)
	}
	objects[len(objects)-1].(*v1alpha1.RevocationSlice).Spec.Certificates = objects[len(objects)-1].(*v1alpha1.RevocationSlice).Spec.Certificates[:revocation.SliceCapacity-1]
	a := newAccess(t, objects...)
	run(t, a, "revoke", "worker-1", "worker-2", "--reason=r", "--dry-run").want(t, 0,
		"the lists have no room for 1 of the nodes: their certificates are recorded, and NOT refused until room appears (1 of 10000 places are free)")
	// two certificates of one node need one place
	run(t, a, "revoke", "worker-1", "--reason=r", "--dry-run").want(t, 0, "the lists have room: 1 of 10000 places are free")
	objects = append(objects, listOf(revocation.PolicyCount+1,
		v1alpha1.RevokedCertificate{SHA256: sumOf(1), NotAfter: before(-time.Hour), NodeName: "n"},
		v1alpha1.RevokedCertificate{SHA256: sumOf(2), NotAfter: before(-time.Hour), NodeName: "without-a-place"}))
	run(t, newAccess(t, objects...), "revocations").want(t, 0, "9999 of 10000 places used, 0 certificates suspended, 1 not in force")
}

// suspends plays the controller's part.
func suspends(t *testing.T, a *access, node string, ek byte, n int) {
	change(t, a.records, &v1alpha1.NodeAttestation{}, node, func(r *v1alpha1.NodeAttestation) {
		meta.SetStatusCondition(&r.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionSuspended, Status: metav1.ConditionTrue})
	})
	change(t, a.records, &v1alpha1.RevocationSlice{}, "c-1", func(l *v1alpha1.RevocationSlice) {
		l.Spec.Certificates = append(l.Spec.Certificates, v1alpha1.RevokedCertificate{SHA256: sumOf(n), NotAfter: before(-time.Hour), NodeName: node, EK: ekOf(ek), Suspended: true})
	})
}

// left returns how many pods are bound to a node, and whether the Node is there.
func left(t *testing.T, a *access, node string) (pods int, there bool) {
	t.Helper()
	bound, err := a.boundPods(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	object, err := a.readNode(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	return len(bound), object != nil
}

// evict does nothing before the suspension is in force. Then it repeats until no pod is bound.
func TestSuspendEvicts(t *testing.T) {
	bubble(t, revocable(), func(t *testing.T, a *access) script {
		return script{
			29 * time.Second: func(context.Context) {
				if pods, node := left(t, a, "worker-2"); pods != 2 || !node {
					t.Errorf("%d pods and the Node: %t, before the suspension is in force", pods, node)
				}
				n := &corev1.Node{}
				if err := a.nodes.Get(t.Context(), client.ObjectKey{Name: "worker-2"}, n); err != nil || n.Spec.Unschedulable {
					t.Errorf("it is cordoned, %v", err)
				}
			},
			// Marked, and on the list of those that may ask again.
			15 * time.Second: func(context.Context) {
				suspends(t, a, "worker-2", 2, 3)
				change(t, a.records, &v1alpha1.RevocationSlice{}, "c-1", func(l *v1alpha1.RevocationSlice) { l.Spec.Certificates[1].Suspended = false })
			},
			30 * time.Second: func(context.Context) {
				change(t, a.records, &v1alpha1.RevocationSlice{}, "c-1", func(l *v1alpha1.RevocationSlice) { l.Spec.Certificates[1].Suspended = true })
			},
			// A scheduler that does not know yet that the Node is gone.
			31 * time.Second: func(ctx context.Context) {
				for there := true; there; _, there = left(t, a, "worker-2") {
					time.Sleep(100 * time.Millisecond)
				}
				time.Sleep(time.Second)
				if err := a.nodes.Create(ctx, podOn("worker-2", "late")); err != nil {
					t.Error(err)
				}
			},
		}
	}, func(t *testing.T, a *access, r result, took time.Duration) {
		r.want(t, 0, "NodeSuspension ek-"+ekOf(2)+" created", "waiting until the suspension is in force: 2: record worker-2, certificate ", "1 certificate of the machine suspended",
			"node worker-2 evicted: 3 pods deleted, and no Node of that name")
		if pods, node := left(t, a, "worker-2"); pods != 0 || node {
			t.Errorf("%d pods are left, the Node: %t", pods, node)
		}
		if pods, node := left(t, a, "worker-1"); pods != 1 || !node {
			t.Errorf("%d pods of another node are left, its Node: %t", pods, node)
		}
		s := &v1alpha1.NodeSuspension{}
		if err := a.records.Get(t.Context(), client.ObjectKey{Namespace: defaultNamespace, Name: "ek-" + ekOf(2)}, s); err != nil || s.Spec != (v1alpha1.NodeSuspensionSpec{EK: ekOf(2), NodeName: "worker-2", Reason: "stolen"}) {
			t.Errorf("%+v, %v", s.Spec, err)
		}
	}, "suspend", "worker-2", "--reason=stolen", "--evict", "--yes")
}

func TestSuspendWithoutController(t *testing.T) {
	none := func(*testing.T, *access) script { return nil }
	bubble(t, revocable(), none, func(t *testing.T, a *access, r result, took time.Duration) {
		r.want(t, codeTimeout, "not known to be in force; nothing was evicted", "hint: is the controller running?")
		if pods, node := left(t, a, "worker-2"); pods != 2 || !node || took != suspendTimeout {
			t.Errorf("%d pods, Node %t, after %v", pods, node, took)
		}
	}, "suspend", "worker-2", "--reason=stolen", "--evict", "--yes")
	// Marked, and not in force.
	objects := revocable()
	objects[0] = forced(corev1.ConditionFalse)
	bubble(t, objects, func(t *testing.T, a *access) script {
		return script{time.Second: func(context.Context) { suspends(t, a, "worker-2", 2, 3) }}
	}, func(t *testing.T, a *access, r result, _ time.Duration) {
		r.want(t, codeNotInForce, "WARNING", "recorded, and not in force")
		if pods, node := left(t, a, "worker-2"); pods != 2 || !node {
			t.Errorf("%d pods, Node %t", pods, node)
		}
	}, "suspend", "worker-2", "--reason=stolen", "--evict", "--yes")
}

// A machine that is suspended is not suspended twice. Its pods can still be evicted.
func TestSuspendAgain(t *testing.T) {
	none := func(*testing.T, *access) script { return nil }
	objects := append(revocable(), readyNode("worker-4"), podOn("worker-4", "web-4"))
	bubble(t, objects, none, func(t *testing.T, a *access, r result, _ time.Duration) {
		r.want(t, 0, "it is suspended already, since 2026-11-23T11:00:00Z")
	}, "suspend", "worker-4", "--reason=again")
	bubble(t, objects, none, func(t *testing.T, a *access, r result, _ time.Duration) {
		r.want(t, 0, "node worker-4 evicted: 1 pod deleted")
		if pods, node := left(t, a, "worker-4"); pods != 0 || node {
			t.Errorf("%d pods, Node %t", pods, node)
		}
	}, "suspend", "worker-4", "--reason=again", "--evict", "--yes")
	bubble(t, objects, func(t *testing.T, a *access) script {
		return script{time.Second: func(context.Context) { suspends(t, a, "worker-2", 2, 3) }}
	}, func(t *testing.T, a *access, r result, _ time.Duration) {
		r.want(t, 0, "record node-attestation-system/worker-2, node worker-2")
		if all, err := a.readSuspensions(t.Context()); err != nil || all[ekOf(2)] == nil || all[ekOf(2)].Spec.NodeName != "worker-2" {
			t.Errorf("%+v, %v", all[ekOf(2)], err)
		}
	}, "suspend", "--ek="+ekOf(2), "--reason=sold", "--yes")
	// Without a record there is nothing to wait for but the API servers.
	bubble(t, objects, none, func(t *testing.T, _ *access, r result, took time.Duration) {
		r.want(t, 0, "no record has this endorsement key", "created")
		if took != settleTime {
			t.Errorf("it took %v", took)
		}
	}, "suspend", "--ek="+strings.ToUpper(ekOf(9)), "--reason=sold", "--yes")
}

// A pod with a finalizer stays bound: that is no success. Another machine's Node stays.
func TestEvictionThatFails(t *testing.T) {
	stuck := podOn("worker-4", "stuck")
	stuck.Finalizers = []string{"example.com/keep"}
	none := func(*testing.T, *access) script { return nil }
	bubble(t, append(revocable(), readyNode("worker-4"), stuck), none, func(t *testing.T, a *access, r result, _ time.Duration) {
		r.want(t, codeTimeout, "pods may still be bound to node worker-4: 1: shop/stuck", "hint: a pod with finalizers")
	}, "suspend", "worker-4", "--reason=r", "--evict", "--yes", "--timeout=1m")
	bubble(t, append(revocable(), readyNode("worker-4")), func(_ *testing.T, a *access) script {
		return script{settleTime + time.Second: func(ctx context.Context) {
			other := readyNode("worker-4")
			other.UID = "another"
			if err := a.nodes.Create(ctx, other); err != nil {
				t.Error(err)
			}
		}}
	}, func(t *testing.T, a *access, r result, _ time.Duration) {
		r.want(t, codeUnexpected, "the Node worker-4 was replaced meanwhile: the new Node is not deleted")
		if _, node := left(t, a, "worker-4"); !node {
			t.Error("it deleted another Node")
		}
	}, "suspend", "worker-4", "--reason=r", "--evict", "--yes")
}

// What eviction deletes is forced, and is exactly what it has read.
func TestEvictionDeletesWhatItRead(t *testing.T) {
	a := newAccess(t, podOn("n", "p"), readyNode("n"))
	var seen []client.DeleteOptions
	cordoned := false
	a.nodes = interceptor.NewClient(a.nodes.(client.WithWatch), interceptor.Funcs{
		Patch: func(_ context.Context, _ client.WithWatch, object client.Object, patch client.Patch, _ ...client.PatchOption) error {
			data, err := patch.Data(object)
			cordoned = object.GetName() == "n" && string(data) == `{"spec":{"unschedulable":true}}` && len(seen) == 0
			return err
		},
		Delete: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.DeleteOption) error {
			o := client.DeleteOptions{}
			o.ApplyOptions(options)
			seen = append(seen, o)
			if p := o.Preconditions; p == nil || p.UID == nil || *p.UID != object.GetUID() || *p.UID == "" {
				t.Errorf("%s: %+v", object.GetName(), p)
			}
			return c.Delete(ctx, object, options...)
		},
	})
	e, err := a.readEviction(t.Context(), "n")
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		i := &invocation{Process: Process{Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := i.await(ctx, e.stage(i, a).wait); err != nil {
			t.Error(err)
		}
	})
	if !cordoned {
		t.Error("it did not cordon the Node first")
	}
	if len(seen) != 2 || seen[0].GracePeriodSeconds == nil || *seen[0].GracePeriodSeconds != 0 || seen[1].GracePeriodSeconds != nil {
		t.Errorf("%+v", seen)
	}
}

func TestResume(t *testing.T) {
	resumed := func(t *testing.T, a *access) script {
		return script{10 * time.Second: func(context.Context) {
			change(t, a.records, &v1alpha1.NodeAttestation{}, "worker-4", func(r *v1alpha1.NodeAttestation) {
				meta.SetStatusCondition(&r.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionSuspended, Status: metav1.ConditionFalse})
			})
		}}
	}
	for _, args := range [][]string{{"resume", "worker-4", "--yes"}, {"resume", "--ek=" + ekOf(4), "--yes"}} {
		bubble(t, revocable(), resumed, func(t *testing.T, a *access, r result, took time.Duration) {
			r.want(t, 0, "NodeSuspension ek-"+ekOf(4)+" deleted", "its old certificates (1) stay revoked", "still says Suspended", "the machine may attest again")
			if took < 10*time.Second || took > 15*time.Second {
				t.Errorf("it took %v", took)
			}
			if all, err := a.readSuspensions(t.Context()); err != nil || len(all) != 0 {
				t.Errorf("%v, %v", all, err)
			}
		}, args...)
	}
	bubble(t, revocable(), func(*testing.T, *access) script { return nil }, func(t *testing.T, _ *access, r result, _ time.Duration) {
		r.want(t, codeTimeout, "has not said so")
	}, "resume", "worker-4", "--yes")
	// The record is gone: the name in the suspension is left.
	gone := slices.DeleteFunc(revocable(), func(o client.Object) bool {
		_, record := o.(*v1alpha1.NodeAttestation)
		return record && o.GetName() == "worker-4"
	})
	run(t, newAccess(t, gone...), "resume", "worker-4", "--yes").want(t, 0, "it has no record: it enrols as a new machine", "deleted")
	a := newAccess(t, append(gone, suspensionOf(5, "worker-4"))...)
	run(t, a, "resume", "worker-4", "--yes").want(t, codeUsage, "several suspensions", "--ek", ekOf(4), ekOf(5))
	ended := attested("worker-4", 4, issued(4, 30*time.Hour))
	run(t, newAccess(t, append(slices.DeleteFunc(gone, func(o client.Object) bool { return o.GetName() == "c-1" }), ended)...), "resume", "worker-4", "--yes").
		want(t, 0, "its old certificates have ended: it needs a bootstrap credential")
}

// Nothing that a peer wrote gets to a terminal as it is, and none of it is long.
func TestHostileRevocations(t *testing.T) {
	objects := revocable()
	for _, o := range objects {
		switch o := o.(type) {
		case *corev1.Namespace:
			o.Status.Conditions[0].Status, o.Status.Conditions[0].Reason, o.Status.Conditions[0].Message = corev1.ConditionFalse, hostile, hostile
		case *v1alpha1.NodeSuspension:
			o.Spec.Reason = hostile
		case *v1alpha1.NodeRevocation:
			o.Spec.Reason, o.Spec.Mode = hostile, v1alpha1.RevocationMode(hostile)
			o.Status.Waiting = []string{hostile, hostile}
		case *v1alpha1.NodeAttestation:
			o.Spec.Machine.Name = hostile
			o.Status.Revocation = &v1alpha1.AppliedRevocation{Name: hostile, Reason: hostile, Time: before(time.Hour)}
			if o.Status.Suspension != nil {
				o.Status.Suspension.Reason = hostile
			}
		case *corev1.Pod:
			o.Namespace = "evil\x1b[2J" + strings.Repeat("A", 2000)
		}
	}
	// Of another machine, with a name as odd as the API allows none.
	objects = append(objects, attested("evil\x1b[2J\u202e", 8, issued(8, time.Hour)))
	a := newAccess(t, objects...)
	for _, args := range [][]string{
		{"revoke", "--all", "--reason=r", "--dry-run"}, {"revoke", "--all", "--reason=r"}, {"revoke", "--all", "--reason=r", "--yes", "--timeout=10ms"},
		{"rotate", "--all", "--reason=r", "--dry-run"}, {"suspend", "worker-2", "--reason=r", "--evict", "--dry-run"}, {"suspend", "worker-4", "--reason=r", "--dry-run"},
		{"resume", "worker-4", "--dry-run"}, {"revocations"}, {"revocations", "-o", "json"}, {"revocations", "-o", "yaml"}, {"describe", "worker-4"}, {"check"},
		{"revoke", hostile, "--reason=r"}, {"suspend", hostile, "--reason=r"}, {"resume", hostile}, {"rotate", "-l", hostile, "--reason=r"}, {"revoke", "--all", "--issued-before", hostile, "--reason=r"},
	} {
		r := run(t, a, args...)
		for _, out := range []string{r.stdout, r.stderr} {
			if len(out) > 16<<10 {
				t.Errorf("%.60q prints %d bytes", args, len(out))
			}
			if at := strings.IndexFunc(out, func(r rune) bool { return r != '\n' && !text.Visible(r) }); at >= 0 {
				t.Errorf("%.60q prints %q", args, out[max(0, at-20):min(len(out), at+20)])
			}
		}
	}
}

func TestCheckRevocation(t *testing.T) {
	var all []client.Object
	for number := int32(1); number <= revocation.PolicyCount; number++ {
		m := metav1.ObjectMeta{Name: revocation.PolicyName(number)}
		all = append(all, &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: m}, &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: m, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: m.Name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		}})
	}
	warns := append(slices.Clone(all), admissionv1Warn()...)
	full := listOf(2)
	for n := range revocation.SliceCapacity {
		full.Spec.Certificates = append(full.Spec.Certificates, v1alpha1.RevokedCertificate{SHA256: sumOf(5000 + n), NotAfter: before(-time.Hour), NodeName: "n"})
	}
	var crowd []client.Object
	for number := int32(2); number <= 9; number++ {
		l := full.DeepCopy()
		l.Name, l.Spec.Number = fmt.Sprint("l", number), number
		for n := range l.Spec.Certificates {
			l.Spec.Certificates[n].SHA256 = sumOf(int(number)*10000 + n)
		}
		crowd = append(crowd, l)
	}
	for name, c := range map[string]struct {
		objects []client.Object
		want    checkup.Status
		says    string
	}{
		"in force":         {append(revocable(), all...), checkup.OK, "it is in force: certificates on the lists: 1"},
		"no policies":      {revocable(), checkup.Failure, "10: node-attestation-revoked-01 is missing"},
		"one is missing":   {append(revocable(), all[2:]...), checkup.Failure, "1: node-attestation-revoked-01 is missing"},
		"one is not bound": {append(revocable(), append(slices.Clone(all[:1]), all[2:]...)...), checkup.Failure, "1: node-attestation-revoked-01 has no binding that denies"},
		"one only warns":   {append(revocable(), warns[2:]...), checkup.Failure, "1: node-attestation-revoked-01 has no binding that denies"},
		"not in force":     {append(append(revocable()[1:], all...), forced(corev1.ConditionFalse)), checkup.Failure, "the writes of each"},
		"no condition":     {append(append(revocable()[1:], all...), recordsNamespace()), checkup.Unknown, "has no condition NodeAttestationRevocationInForce"},
		"nearly full":      {append(append(revocable(), all...), crowd...), checkup.Warning, "8001 of 10000 places on the lists are used"},
		"beyond": {append(append(revocable(), all...), listOf(11, v1alpha1.RevokedCertificate{SHA256: sumOf(1), NotAfter: before(-time.Hour), NodeName: "n"})), checkup.Failure,
			"the lists are full, and do not refuse 1 of the revoked certificates"},
	} {
		t.Run(name, func(t *testing.T) {
			e := &examination{access: newAccess(t, c.objects...), now: now}
			if f := e.checkRevocation(t.Context()); f.Status != c.want || !strings.Contains(f.Message, c.says) || f.Status != checkup.OK && f.Remedy == "" {
				t.Errorf("%+v", f)
			}
		})
	}
}

// admissionv1Warn is a policy with a binding that only warns.
func admissionv1Warn() []client.Object {
	m := metav1.ObjectMeta{Name: revocation.PolicyName(1)}
	return []client.Object{&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: m}, &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: m, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: m.Name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Warn},
	}}}
}
