// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/packaging"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// fleet is a cluster with one node of each kind: healthy, renewing, waiting for its first
// certificate, and refused. Another TPM uses the first node's name.
func fleet() []client.Object {
	proof := request("node-csr-3", tpmSigner, "worker-1", "", []byte("{}"))
	proof.Status.Certificate = []byte("certificate")
	first := newRecord("worker-1", 1)
	first.Status.Request = &v1alpha1.RequestReference{Name: proof.Name, UID: proof.UID, SHA256: strings.Repeat("0", 64)}
	return []client.Object{
		first, newRecord("worker-2", 2),
		ends(newHello("node-csr-1", "worker-1", "metal://worker-1", 1, ""), certificatesv1.CertificateDenied, attestation.ReasonCompleted, "the proof has its certificate"),
		waits(newHello("node-csr-2", "worker-2", "", 2, ""), "SignerUnavailable", "there is no CA that can sign at present"),
		ends(proof, certificatesv1.CertificateApproved, "Attested", "the evidence was verified"),
		waits(newHello("node-csr-4", "worker-9", "metal://worker-9", 9, ""), "MachineNotFound", "no machine is known that the evidence belongs to"),
		ends(newHello("node-csr-5", "worker-8", "", 8, ""), certificatesv1.CertificateDenied, "NodeAlreadyRegistered", "a Node of that name exists"),
		ends(newHello("node-csr-6", "worker-1", "", 7, ""), certificatesv1.CertificateDenied, "IdentityBound", "record: the node name is bound to another endorsement key"),
		newEventOn("Node", "worker-1", "IdentityBound", "node-csr-6: record: the node name is bound to another endorsement key", 4*time.Minute),
		newEventOn("CertificateSigningRequest", "node-csr-4", "MachineNotFound", "no machine", 5*time.Minute),
	}
}

func TestGolden(t *testing.T) {
	for name, args := range map[string][]string{
		"status.txt": {"status"}, "status-node.yaml": {"status", "worker-1", "-o", "yaml"}, "status-unknown.txt": {"status", "worker-7"},
		"pending.txt": {"pending"}, "pending.json": {"pending", "-o", "json"}, "pending-inventory.txt": {"pending", "-o", "inventory"},
		"describe.txt": {"describe", "worker-1"}, "describe-claimed.txt": {"describe", "worker-9"},
		"reset-unconfirmed.txt": {"reset", "worker-1"}, "reset.txt": {"reset", "worker-2", "--yes"}, "reset-nothing.txt": {"reset", "worker-9", "--yes"},
		"check-empty.txt": {"check"}, "version.txt": {"version", "--client"}, "usage.txt": {"status", "a", "b"},
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t, newAccess(t, fleet()...), args...)
			if name == "version.txt" {
				r.stdout, _, _ = strings.Cut(r.stdout, ", go")
				r.stdout += "\n"
			}
			wantGolden(t, name, r)
		})
	}
}

// The commands show who would pass. The verdict of a rehearsal does not wait, replaces no real
// request, and says nothing about a node that has a record. The hello of a judged proof, which
// stays open, is not shown as waiting.
func TestRehearsalsAreShown(t *testing.T) {
	rehearsal := func(name, node string, ek byte, annotation, value string) *certificatesv1.CertificateSigningRequest {
		r := helloFor(attestation.RehearsalSignerName, name, node, "", ek, "")
		r.Spec.Username = "system:node:" + node
		metav1.SetMetaDataAnnotation(&r.ObjectMeta, annotation, value)
		return r
	}
	open := challenged(rehearsal("hello", "passes", 1, "x", ""))
	open.CreationTimestamp = before(5 * time.Hour) // its challenge ended long ago
	proof := request("proof", attestation.RehearsalSignerName, "passes", "", must(attestation.Proof{
		Version: attestation.VersionTPM, HelloName: "hello", HelloUID: "uid-hello", KeyID: "k", Expires: 1, PCRBank: "sha256",
		PCRs: []attestation.PCR{{Index: 0, Value: make([]byte, 32)}}, Quote: []byte{1}, Signature: []byte{1},
	}.Marshal()))
	proof.Spec.Username = "system:node:passes"
	metav1.SetMetaDataAnnotation(&proof.ObjectMeta, attestation.AnnotationVerdict, "RehearsalPassed: it would get one")
	objects := []client.Object{
		open, proof, rehearsal("r-2", "fails", 2, attestation.AnnotationVerdict, "ProviderIDMismatch: no"), newRecord("has-record", 4),
		rehearsal("r-3", "waits", 3, attestation.AnnotationWaiting, "MachineNotFound: unknown"),
		rehearsal("r-4", "has-record", 4, attestation.AnnotationVerdict, "IdentityBound: no"),
		newHello("real", "fails", "", 2, ""),
	}
	objects[len(objects)-1].(*certificatesv1.CertificateSigningRequest).Spec.Username = "system:node:fails"
	status := run(t, newAccess(t, objects...), "status").stdout
	for _, want := range []string{
		`(?m)^passes +Rehearsed +<none> +[0-9a-f]{12} +<none> +RehearsalPassed +<none>$`,
		`(?m)^fails +Rehearsed .* ProviderIDMismatch +<none>$`, `(?m)^fails +Claimed `, `(?m)^waits +Rehearsed .* MachineNotFound +5m$`,
	} {
		if !regexp.MustCompile(want).MatchString(status) {
			t.Errorf("no %s in\n%s", want, status)
		}
	}
	if strings.Count(status, "passes") != 1 || strings.Count(status, "has-record") != 2 { // the node and its machine
		t.Errorf("%s", status)
	}
	if r := run(t, newAccess(t, objects...), "pending"); strings.Contains(r.stdout, "passes") || strings.Contains(r.stdout, "r-2") || !strings.Contains(r.stdout, "real") || !strings.Contains(r.stdout, "r-3") {
		t.Errorf("%s", r.stdout)
	}
	if r := run(t, newAccess(t, objects...), "describe", "passes"); !strings.Contains(r.stdout, "verdict: RehearsalPassed: it would get one") {
		t.Errorf("%s", r.stdout)
	}
	if r := run(t, newAccess(t, objects...), "reset", "waits", "--yes"); strings.Contains(r.stdout+r.stderr, "r-3") {
		t.Errorf("%+v", r)
	}
}

// A kubelet that requests by itself waits for ever. The commands show it and say why. Nobody else's
// request does, and none that is decided.
func TestRequestsWithoutEvidenceAreShown(t *testing.T) {
	bare := func(name, signer, node string) *certificatesv1.CertificateSigningRequest {
		r := request(name, signer, node, "", []byte("{}"))
		block, _ := pem.Decode(r.Spec.Request)
		r.Spec.Request = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: block.Bytes})
		return r
	}
	objects := []client.Object{recordsNamespace(), bare("csr-1", builtinSigner, "forgotten"), bare("csr-2", "kubernetes.io/legacy-unknown", "another"),
		ends(bare("csr-3", builtinSigner, "decided"), certificatesv1.CertificateApproved, "AutoApproved", "x")}
	for _, args := range [][]string{{"pending"}, {"status"}, {"describe", "forgotten"}, {"check"}} {
		r := run(t, newAccess(t, objects...), args...)
		if !strings.Contains(r.stdout, "forgotten") || strings.Contains(r.stdout, "another") || strings.Contains(r.stdout, "decided") {
			t.Errorf("%q: %+v", args, r)
		}
		if args[0] != "check" && !strings.Contains(r.stdout, telemetry.ReasonNoEvidence) {
			t.Errorf("%q: %+v", args, r)
		}
	}
	if r := run(t, newAccess(t, objects...), "describe", "forgotten"); !strings.Contains(r.stdout, "is kubelet-authenticator switched on there?") {
		t.Errorf("%+v", r)
	}
	if r := run(t, newAccess(t, objects...), "pending", "-o", "inventory"); strings.Contains(r.stdout, "forgotten") {
		t.Errorf("%+v", r)
	}
}

func recordsNamespace() *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: defaultNamespace}}
}

// A namespace that does not exist is not an empty one.
func TestNoNamespace(t *testing.T) {
	waits := newHello("node-csr-1", "worker-2", "", 1, "") // requests have no namespace
	for _, args := range [][]string{{"status"}, {"status", "worker-2"}, {"describe", "worker-2"}} {
		for _, objects := range [][]client.Object{nil, {waits}} {
			if r := run(t, newAccess(t, objects...), args...); r.code != codeNotFound || r.stdout != "" || !strings.Contains(r.stderr, `there is no namespace "node-attestation-system"`) {
				t.Errorf("%q: %+v", args, r)
			}
		}
	}
	if r := run(t, newAccess(t, recordsNamespace()), "status"); r.code != 0 {
		t.Errorf("%+v", r)
	}
}

// An EK that another node's record has is named, and an EK without a template leaves no gap.
func TestDescribeNamesTheOtherRecord(t *testing.T) {
	record := newRecord("worker-1", 1)
	record.Spec.EK.Template = ""
	denied := ends(newHello("node-csr-1", "worker-2", "", 1, ""), certificatesv1.CertificateDenied, "IdentityBound", "record: x")
	r := run(t, newAccess(t, record, denied), "describe", "worker-2")
	if r.code != 0 || !strings.Contains(r.stdout, "which the record of node worker-1 has") {
		t.Errorf("%+v", r)
	}
	if r = run(t, newAccess(t, record, denied), "describe", "worker-1"); strings.Contains(r.stdout, "(, ") || !strings.Contains(r.stdout, " (named by ") {
		t.Errorf("%+v", r)
	}
}

// describe names the machine that the inventory has an EK for, and no reason twice.
func TestDescribeNamesTheInventoryEntry(t *testing.T) {
	hello := newHello("node-csr-1", "worker-2", "", 1, "")
	fingerprint := claimedEK(hello).Fingerprint
	objects := []client.Object{
		recordsNamespace(),
		ends(hello, certificatesv1.CertificateDenied, "NodeNameMismatch", "NodeNameMismatch: the machine is another node; RequestAge: old"),
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: configMapName}, Data: map[string]string{configKey: goodConfig}},
		inventoryOf("- name: rack-7\n  nodeName: worker-7\n  eks:\n  - fingerprint: " + fingerprint),
	}
	r := run(t, newAccess(t, objects...), "describe", "worker-2")
	if r.code != 0 || !strings.Contains(r.stdout, ", which the inventory has for machine rack-7, node worker-7") || !strings.Contains(r.stdout, "Denied: NodeNameMismatch: the machine") {
		t.Errorf("%+v", r)
	}
}

// The controller's version is its image. Without a cluster, only the program's own is shown.
func TestVersionOfTheController(t *testing.T) {
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: telemetry.Component}, Status: appsv1.DeploymentStatus{Replicas: 2, UpdatedReplicas: 1}}
	deployment.Spec.Template.Spec.Containers = []corev1.Container{{Name: "controller", Image: "example.com/controller:v1.2.3"}}
	r := run(t, newAccess(t, deployment), "version")
	if r.code != 0 || !strings.Contains(r.stdout, telemetry.Component+" example.com/controller:v1.2.3, 1 of 2 pods updated to it") {
		t.Errorf("%+v", r)
	}
	if r := run(t, newAccess(t), "version"); r.code != 0 || !strings.Contains(r.stdout, Name) || !strings.Contains(r.stderr, "is not known") {
		t.Errorf("%+v", r)
	}
	if r := run(t, newAccess(t, deployment), "version", "-o", "json"); r.code != 0 || strings.Contains(r.stdout, telemetry.Component) {
		t.Errorf("%+v", r)
	}
}

// status selects by the labels of the Nodes, and a wide table has more columns.
func TestStatusSelectsNodes(t *testing.T) {
	objects := append(fleet(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-1", Labels: map[string]string{"pool": "gpu"}}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-2"}})
	r := run(t, newAccess(t, objects...), "status", "-l", "pool=gpu", "-o", "wide")
	if r.code != 0 || !strings.Contains(r.stdout, "worker-1") || strings.Contains(r.stdout, "worker-2") || !strings.Contains(r.stdout, "ATTESTED") || !strings.Contains(r.stdout, defaultNamespace+"/worker-1") {
		t.Errorf("%+v", r)
	}
	if r := run(t, newAccess(t, objects...), "status", "-l", "a b"); r.code != codeUsage {
		t.Errorf("%+v", r)
	}
	if r := run(t, newAccess(t, objects...), "status", "worker-2", "-l", "pool=gpu"); r.code != codeNotFound {
		t.Errorf("%+v", r)
	}
}

// status --watch prints the head once, and then each line that has changed. Time alone changes
// none.
func TestStatusIsWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		record := newRecord("worker-1", 1)
		a := newAccess(t, record, newRecord("worker-2", 2))
		go func() {
			time.Sleep(30 * time.Second)
			change(t, a.records, &v1alpha1.NodeAttestation{}, record.Name, func(r *v1alpha1.NodeAttestation) {
				r.Status.Suspension = &v1alpha1.AppliedSuspension{Reason: "stolen"}
			})
		}()
		var out, errs bytes.Buffer
		start := time.Now()
		program := Program{access: a, now: func() time.Time { return now.Add(time.Since(start)) }}
		code := program.Run(ctx, Process{Args: []string{"status", "--watch"}, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Getenv: os.Getenv})
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if code != 0 || errs.String() != "" || len(lines) != 4 || !strings.HasPrefix(lines[0], "NODE") || !strings.Contains(lines[3], "Suspended") {
			t.Errorf("exit code %d: %s%s", code, out.String(), errs.String())
		}
	})
}

// A watch that shows nothing says why, once. A namespace that does not exist ends it.
func TestWatchOfNothing(t *testing.T) {
	namespace := recordsNamespace()
	for name, c := range map[string]struct {
		objects []client.Object
		args    []string
		code    int
		says    string
	}{
		"no such node":      {[]client.Object{namespace, newRecord("worker-1", 1)}, []string{"status", "worker-9", "--watch"}, 0, `node "worker-9" has no record and no request yet`},
		"no node":           {[]client.Object{namespace}, []string{"status", "--watch"}, 0, "no node has a record or a request yet"},
		"no such namespace": {nil, []string{"status", "--watch"}, codeNotFound, "there is no namespace"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				var out, errs bytes.Buffer
				code := Program{access: newAccess(t, c.objects...)}.Run(ctx, Process{Args: c.args, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Getenv: os.Getenv})
				if code != c.code || out.Len() > 0 || strings.Count(errs.String(), c.says) != 1 {
					t.Errorf("exit code %d: %s%s", code, out.String(), errs.String())
				}
			})
		})
	}
}

// A row says whether the node has a certificate that API servers accept.
func TestStateOfANode(t *testing.T) {
	for want, change := range map[recordState]func(*v1alpha1.NodeAttestation){
		nodeAttested: func(*v1alpha1.NodeAttestation) {},
		nodeRevoked: func(r *v1alpha1.NodeAttestation) {
			r.Status.Certificates[0].Revoked = true
			r.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionRevoked, Status: metav1.ConditionTrue, Message: "key leaked"}}
		},
		nodeSuspended: func(r *v1alpha1.NodeAttestation) { r.Status.Suspension = &v1alpha1.AppliedSuspension{Reason: "stolen"} },
		nodeExpired:   func(r *v1alpha1.NodeAttestation) { r.Status.Certificates[0].NotAfter = metav1.NewTime(now) },
		nodeAdmitted:  func(r *v1alpha1.NodeAttestation) { r.Status.Certificates = nil },
	} {
		record := newRecord("worker-1", 1)
		change(record)
		s, err := newAccess(t, record).status(t.Context(), "", "", now)
		if err != nil || s.Nodes[0].State != want {
			t.Errorf("%s: %+v, %v", want, s.Nodes, err)
		}
		if wantReason := map[recordState]string{nodeRevoked: "CertificateRevoked", nodeSuspended: "MachineSuspended"}[want]; wantReason != "" && s.Nodes[0].Reason != wantReason {
			t.Errorf("%s: %+v", want, s.Nodes[0])
		}
	}
}

// A request is on a record's line only with the EK of the record. Another one is a claim.
func TestClaimsStayApart(t *testing.T) {
	a := newAccess(t, fleet()...)
	s, err := a.status(t.Context(), "worker-1", "", now)
	if err != nil || len(s.Nodes) != 2 {
		t.Fatalf("%+v, %v", s, err)
	}
	if own := s.Nodes[0]; own.Claimed || own.EK != ekOf(1) || own.Reason == "IdentityBound" {
		t.Errorf("the record's line has what another TPM got: %+v", own)
	}
	if other := s.Nodes[1]; !other.Claimed || other.EK != ekOf(7) || other.Reason != "IdentityBound" {
		t.Errorf("%+v", other)
	}
}

// hostile is what a requester writes to get at the terminal of an operator.
var hostile = "evil\x1b]0;owned\x07\x1b[2J\u202e\u009b31m\r\n- nodeName: injected\x00" + strings.Repeat("A", 64<<10)

// Nothing that a requester writes gets to a terminal as it is, and none of it is long.
func TestHostileRequests(t *testing.T) {
	object := waits(newHello("node-csr-1", "victim", "", 1, "\x1b[31mMaker\n"+strings.Repeat("B", 4000)), "MachineNotFound", "x")
	object.Spec.Username = hostile
	long := newHello("node-csr-2", "victim-2", "", 2, "")
	metav1.SetMetaDataAnnotation(&long.ObjectMeta, attestation.AnnotationWaiting, "Reason: "+hostile)
	denied := ends(newHello("node-csr-3", "victim-3", "", 3, ""), certificatesv1.CertificateDenied, hostile, hostile)
	unreadable := newHello("node-csr-4", "x", "", 4, "")
	unreadable.Spec.Request = []byte(hostile + strings.Repeat("A", 1<<20))
	other := request("node-csr-5", tpmSigner, "victim-5", "", []byte(hostile))
	record := newRecord("victim", 1)
	// as long as the CRD allows
	record.Spec.Machine.Name, record.Spec.ProviderID = hostile[:100], hostile[:1000]
	denied.Status.Conditions[0].Message += strings.Repeat("A", 1<<20)
	event := newEventOn("Node", "victim", hostile, hostile, time.Minute)
	event.Name = "event"
	a := newAccess(t, object, long, denied, unreadable, other, record, event)
	for _, args := range [][]string{
		{"status"}, {"status", "-o", "json"}, {"status", "-o", "yaml"}, {"pending"}, {"pending", "-o", "json"}, {"pending", "-o", "inventory"},
		{"describe", "victim"}, {"describe", "victim-3"}, {"describe", "victim", "-o", "json"}, {"reset", "victim"}, {"status", hostile}, {"describe", hostile},
	} {
		r := run(t, a, args...)
		for _, out := range []string{r.stdout, r.stderr} {
			if len(out) > 16<<10 {
				t.Errorf("%v prints %d bytes", args[0], len(out))
			}
			if at := strings.IndexFunc(out, func(r rune) bool { return r != '\n' && !text.Visible(r) }); at >= 0 {
				t.Errorf("%.40q prints %q", args, out[max(0, at-20):min(len(out), at+20)])
			}
		}
		if strings.Contains(r.stdout, "\n- nodeName: injected") {
			t.Errorf("%v: a requester adds a line:\n%s", args, r.stdout)
		}
	}
}

// What is printed as an entry is an inventory with exactly the machines that are safe to list.
func TestEntriesParse(t *testing.T) {
	configured := []client.Object{
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: configMapName}, Data: map[string]string{configKey: goodConfig}},
		inventoryOf("- {nodeName: listed, providerID: 'metal://listed', eks: [{fingerprint: " + ekOf(50) + "}]}\n" +
			"- {name: rack-7, nodeName: other, addresses: [www.example.com], eks: [{fingerprint: " + ekOf(51) + "}]}"),
	}
	for name, c := range map[string]struct {
		requests []client.Object
		want     []string
		says     string
	}{
		"none":              {nil, nil, "machines: []"},
		"one":               {[]client.Object{newHello("a", "node-a", "metal://a", 1, "Maker")}, []string{"node-a"}, "Maker"},
		"as it waits":       {[]client.Object{waits(newHello("a", "node-a", "", 1, ""), "MachineNotFound", "x")}, []string{"node-a"}, ""},
		"waits for a CA":    {[]client.Object{waits(newHello("a", "node-a", "", 1, ""), "SignerUnavailable", "x")}, nil, "no entry to print"},
		"challenged":        {[]client.Object{challenged(newHello("a", "node-a", "", 1, ""))}, nil, "machines: []"},
		"an older one, too": {[]client.Object{newHello("a", "node-a", "", 1, ""), newHello("b", "node-a", "", 1, "")}, []string{"node-a"}, ""},
		"two of one name":   {[]client.Object{newHello("a", "node-a", "", 1, ""), newHello("b", "node-a", "", 2, "")}, nil, "claim this node name"},
		"two of one EK":     {[]client.Object{newHello("a", "node-a", "", 1, ""), newHello("b", "node-b", "", 1, "")}, nil, "claim this endorsement key"},
		"two of one ID":     {[]client.Object{newHello("a", "node-a", "x://1", 1, ""), newHello("b", "node-b", "x://1", 2, "")}, nil, "claim this provider ID"},
		"listed":            {[]client.Object{newHello("a", "listed", "", 50, "")}, nil, "machines: []"},
		"a listed name":     {[]client.Object{newHello("a", "listed", "", 1, "")}, nil, "with another endorsement key"},
		"a machine's name":  {[]client.Object{newHello("a", "rack-7", "", 1, "")}, nil, "another machine with this name"},
		"a DNS name":        {[]client.Object{newHello("a", "www.example.com", "", 1, "")}, nil, "another machine with this name"},
		"a listed ID":       {[]client.Object{newHello("a", "node-a", "metal://listed", 1, "")}, nil, "has this provider ID"},
		"beside a bad one":  {[]client.Object{newHello("a", "listed", "", 1, ""), newHello("b", "node-b", "", 2, "")}, []string{"node-b"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t, newAccess(t, append(c.requests, configured...)...), "pending", "-o", "inventory")
			r.want(t, 0, "WARNING: to list a machine is to trust it", c.says)
			if !strings.Contains(r.stdout, "# WARNING") || !strings.Contains(r.stderr, "WARNING") {
				t.Error("the warning is not in both")
			}
			// It is pasted behind what there is.
			parsed, err := inventory.Parse([]byte(r.stdout))
			if err != nil {
				t.Fatalf("%v in\n%s", err, r.stdout)
			}
			var names []string
			for _, m := range parsed.All() {
				names = append(names, m.NodeName)
				if len(m.EKs) != 1 || m.Disputed {
					t.Errorf("%+v", m)
				}
			}
			if !slices.Equal(names, c.want) {
				t.Errorf("machines %q, not %q:\n%s", names, c.want, r.stdout)
			}
		})
	}
}

// A claim that two requests share is a problem also if only one of them is asked for.
func TestEntriesAreComparedWithAll(t *testing.T) {
	t.Parallel()
	a := newAccess(t, newHello("a", "victim", "x://1", 1, ""), newHello("b", "evil", "", 1, ""), newHello("c", "thief", "x://1", 2, ""))
	run(t, a, "pending", "evil", "-o", "inventory").want(t, 0, "machines: []", "claim this endorsement key")
	r := run(t, a, "pending", "thief", "-o", "inventory")
	r.want(t, 0, "machines: []", "claim this provider ID")
	if strings.Contains(r.stdout, "victim") {
		t.Errorf("it prints more than was asked for:\n%s", r.stdout)
	}
}

func challenged(object *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	c := attestation.Challenge{
		Version: attestation.VersionTPM, KeyID: "k", Expires: now.Add(time.Minute).Unix(), CredentialBlob: []byte("x"), EncryptedSecret: []byte("x"),
		PCRs: attestation.PCRSelection{Bank: "sha256", Indexes: []int{0}},
	}
	value, err := c.Marshal()
	if err != nil {
		panic(err)
	}
	metav1.SetMetaDataAnnotation(&object.ObjectMeta, attestation.AnnotationChallenge, string(value))
	return object
}

// reset deletes what it has shown, and only after a confirmation.
func TestResetIsConfirmed(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-1", UID: "n"}}
	there := func(a *access, object client.Object) bool {
		err := a.records.Get(t.Context(), client.ObjectKeyFromObject(object), object.DeepCopyObject().(client.Object))
		return err == nil
	}
	for name, c := range map[string]struct {
		args         []string
		code         int
		says         string
		record, node bool
	}{
		"no terminal":     {[]string{"reset", "worker-1"}, codeNotConfirmed, "hint: --yes", true, true},
		"yes":             {[]string{"reset", "worker-1", "--yes"}, 0, "the Node stays", false, true},
		"with the Node":   {[]string{"reset", "worker-1", "--yes", "--delete-node"}, 0, "Node worker-1 deleted", false, false},
		"another node":    {[]string{"reset", "worker-2", "--yes"}, codeNotFound, "there is nothing to delete", true, true},
		"a wrong record":  {[]string{"reset", "worker-1", "--yes", "--record=x"}, codeNotFound, "no record", true, true},
		"the right one":   {[]string{"reset", "worker-1", "--yes", "--record=worker-1"}, 0, "deleted", false, true},
		"without a node":  {[]string{"reset"}, codeUsage, "hint: see --help", true, true},
		"an unknown flag": {[]string{"reset", "worker-1", "--force"}, codeUsage, "force", true, true},
	} {
		t.Run(name, func(t *testing.T) {
			record := newRecord("worker-1", 1)
			a := newAccess(t, record, node.DeepCopy())
			run(t, a, c.args...).want(t, c.code, c.says)
			if there(a, record) != c.record || there(a, node) != c.node {
				t.Errorf("the record is there: %t, the Node: %t", there(a, record), there(a, node))
			}
		})
	}
}

// A record that changed since it was shown stays, and so does one of another UID.
func TestResetDeletesWhatWasShown(t *testing.T) {
	var seen client.DeleteOptions
	record := newRecord("worker-1", 1)
	a := newAccess(t, record)
	a.records = interceptor.NewClient(a.records.(client.WithWatch), interceptor.Funcs{
		Delete: func(_ context.Context, _ client.WithWatch, object client.Object, options ...client.DeleteOption) error {
			seen.ApplyOptions(options)
			return apierrors.NewConflict(v1alpha1.Resource.GroupResource(), object.GetName(), errors.New("changed"))
		},
	})
	run(t, a, "reset", "worker-1", "--yes").want(t, codeUnexpected, "changed since it was shown", "hint: look at it again")
	if p := seen.Preconditions; p == nil || p.UID == nil || *p.UID != record.UID || p.ResourceVersion == nil || *p.ResourceVersion == "" {
		t.Errorf("%+v", seen.Preconditions)
	}
}

// A failure between two writes: what was deleted before it is reported, and the rest stays.
func TestResetReportsWhatItDeleted(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-1", UID: "n"}}
	a := newAccess(t, newRecord("worker-1", 1), node)
	a.nodes = interceptor.NewClient(a.nodes.(client.WithWatch), interceptor.Funcs{
		Delete: func(context.Context, client.WithWatch, client.Object, ...client.DeleteOption) error {
			return apierrors.NewForbidden(corev1.Resource("nodes"), "worker-1", errors.New("no"))
		},
	})
	r := run(t, a, "reset", "worker-1", "--delete-node", "--yes")
	r.want(t, codeAPIRefused, "hint: the rights are in")
	if r.stdout != "record worker-1 deleted\n" {
		t.Errorf("it reports %q", r.stdout)
	}
}

// Two records of one node name: the operator says which.
func TestResetOfTwoRecords(t *testing.T) {
	second := newRecord("worker-1", 2)
	second.Name = "other"
	a := newAccess(t, newRecord("worker-1", 1), second)
	run(t, a, "reset", "worker-1", "--yes").want(t, codeUsage, "--record", "other")
	run(t, a, "reset", "worker-1", "--yes", "--record=other").want(t, 0, "record other deleted")
}

const goodConfig = `apiVersion: controller.attestation.cluster.x-k8s.io/v1alpha1
kind: NodeAttestationControllerConfiguration
clusterUID: c
signing: {mode: Sign, secretName: node-attestation-ca}
inventory: {configMap: {name: node-attestation-inventory, key: inventory.yaml}}
tpm: {pcrs: {bank: sha256, indexes: [0]}}
`

func inventoryOf(machines string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: "node-attestation-inventory"},
		Data:       map[string]string{"inventory.yaml": "apiVersion: " + inventory.APIVersion + "\nkind: MachineInventory\nmachines:\n" + machines + "\n"},
	}
}

// What the user may not read is unknown, with the right that is missing, and never ok.
func TestCheckWithoutRights(t *testing.T) {
	a := newAccess(t)
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "things"}, "x", errors.New(`user "u" cannot get`))
	a.records = interceptor.NewClient(a.records.(client.WithWatch), interceptor.Funcs{
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return forbidden
		},
		List: func(context.Context, client.WithWatch, client.ObjectList, ...client.ListOption) error {
			return forbidden
		},
	})
	a.nodes = a.records
	r := run(t, a, "check")
	r.want(t, codeCheckUnknown, "forbidden", "node-attestation-viewer")
	for line := range strings.Lines(r.stdout) {
		if !strings.HasPrefix(line, string(checkup.Unknown)) && !strings.HasPrefix(line, " ") {
			t.Errorf("%s", line)
		}
	}
}

// The check finds static policies, which the API does not show. A viewer may not ask for them. Then
// the check says who may.
func TestCheckOfStaticPolicies(t *testing.T) {
	release := must(policyset.ReleaseDigest(policyset.Alone, false))
	forbidden := func(message string) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "namespaces"}, defaultNamespace, errors.New(message))
	}
	static := forbidden(fmt.Sprintf("ValidatingAdmissionPolicy '%[1]s' with binding '%[1]s' denied request: static policies of node-attestation-controller: "+
		`{"digest":"1","release":"%[2]s","controllers":["system:serviceaccount:node-attestation-system:node-attestation-controller"],"scope":"alone"}`, policyset.IdentityName, release))
	viewer := forbidden(`User "viewer" cannot patch resource "namespaces/status"`)
	for name, c := range map[string]struct {
		answer  error
		version string
		status  checkup.Status
		message string
	}{
		"static":                {static, "v1.37.2", checkup.OK, "the policies are the release's; API servers with static policies: https://api.example; not each API server was asked for static policies: "},
		"none":                  {nil, "v1.37.2", checkup.Failure, "missing, or without a binding: 7: "},
		"a viewer":              {viewer, "v1.37.2", checkup.Unknown, "not in force through the API, and perhaps as static policies: missing, or without a binding: 7: "},
		"a viewer, before 1.36": {viewer, "v1.35.1", checkup.Failure, "missing, or without a binding: 7: "},
	} {
		server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			status := metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound, Message: "not found"}
			switch {
			case r.URL.Path == "/version":
				_ = json.NewEncoder(w).Encode(map[string]string{"gitVersion": c.version})
				return
			case r.Method == http.MethodPatch && r.URL.String() == "/api/v1/namespaces/"+defaultNamespace+"/status?dryRun=All" && c.answer == nil:
				return
			case r.Method == http.MethodPatch:
				refused, _ := errors.AsType[*apierrors.StatusError](c.answer)
				status.Code, status.Reason, status.Message = http.StatusForbidden, metav1.StatusReasonForbidden, refused.ErrStatus.Message
			}
			w.WriteHeader(int(status.Code))
			_ = json.NewEncoder(w).Encode(status)
		}))
		a := newAccess(t)
		a.nodesConfig = &rest.Config{
			Host: "https://api.example", TLSClientConfig: rest.TLSClientConfig{Insecure: true},
			Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, network, server.Listener.Addr().String())
			},
		}
		f := (&examination{access: a, now: now}).checkPolicies(t.Context())
		if f.Status != c.status || !strings.HasPrefix(f.Message, c.message) {
			t.Errorf("%s: %+v", name, f)
		}
		if f.Status == checkup.Unknown && (!strings.Contains(f.Message, `User "viewer" cannot patch`) || !strings.Contains(f.Remedy, "policies-condition")) {
			t.Errorf("%s: %+v", name, f)
		}
		server.Close()
	}
}

// autoApproving is a binding that lets kube-controller-manager approve.
func autoApproving() *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "kubeadm:b"}, Subjects: []rbacv1.Subject{{Kind: "Group", Name: "g"}},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:certificates.k8s.io:certificatesigningrequests:nodeclient"},
	}
}

// A failure outweighs what is not known, and that a warning.
func TestReportIsItsWorstCheck(t *testing.T) {
	e := &examination{access: newAccess(t), now: now}
	r, err := e.run(t.Context())
	if err != nil || r.Status != checkup.Failure || len(r.Checks.Named(checkup.Unknown)) == 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestBindingsAreFound(t *testing.T) {
	e := examination{access: newAccess(t), now: now}
	if f := e.checkBindings(t.Context()); f.Status != checkup.OK {
		t.Errorf("%+v", f)
	}
	e.access = newAccess(t, autoApproving())
	if f := e.checkBindings(t.Context()); f.Status != checkup.Failure || !strings.Contains(f.Remedy, "kubectl delete clusterrolebinding kubeadm:b") {
		t.Errorf("%+v", f)
	}
	e.guarded = true // by the policies
	if f := e.checkBindings(t.Context()); f.Status != checkup.Warning || f.Remedy == "" {
		t.Errorf("%+v", f)
	}
}

// twoParts is an inventory of two ConfigMaps. The first has machine a with EK 1.
func twoParts(second string, ek byte) []client.Object {
	other := inventoryOf("- {nodeName: " + second + ", eks: [{fingerprint: " + ekOf(ek) + "}]}")
	other.Name = "second"
	return []client.Object{
		&corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: configMapName},
			Data: map[string]string{configKey: strings.Replace(goodConfig, "{configMap: {name: node-attestation-inventory, key: inventory.yaml}}",
				"{configMaps: [{name: node-attestation-inventory, key: inventory.yaml}, {name: second, key: inventory.yaml}]}", 1)},
		},
		inventoryOf("- {nodeName: a, eks: [{fingerprint: " + ekOf(1) + "}]}"),
		other,
	}
}

func TestInventoryIsChecked(t *testing.T) {
	settings := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: configMapName}, Data: map[string]string{configKey: goodConfig}}
	for name, c := range map[string]struct {
		objects []client.Object
		state   checkup.Status
		says    string
	}{
		"none":                  {[]client.Object{settings}, checkup.Failure, "not found"},
		"broken":                {[]client.Object{settings, inventoryOf("- {nodeName: [}")}, checkup.Failure, "line"},
		"doubled":               {[]client.Object{settings, inventoryOf(fmt.Sprintf("- {nodeName: a, eks: [{fingerprint: %s}]}\n- {nodeName: b, eks: [{fingerprint: %[1]s}]}", ekOf(1)))}, checkup.Failure, "is claimed by"},
		"good":                  {[]client.Object{settings, inventoryOf("- {nodeName: a, eks: [{fingerprint: " + ekOf(1) + "}]}")}, checkup.OK, "1 machine"},
		"unknown":               {nil, checkup.Unknown, "configuration"},
		"of two, both good":     {twoParts("b", 2), checkup.OK, "2 machines"},
		"of two, contradicting": {twoParts("a", 2), checkup.Failure, "listed differently"},
		"of two, one missing":   {twoParts("b", 2)[:2], checkup.Failure, `"second" not found`},
	} {
		t.Run(name, func(t *testing.T) {
			e := examination{access: newAccess(t, c.objects...), now: now}
			e.checkConfiguration(t.Context())
			if f := e.checkInventory(t.Context()); f.Status != c.state || !strings.Contains(f.Message, c.says) {
				t.Errorf("%+v", f)
			}
		})
	}
}

func TestConditionsAreShown(t *testing.T) {
	for status, want := range map[corev1.ConditionStatus]checkup.Status{
		corev1.ConditionTrue: checkup.OK, corev1.ConditionFalse: checkup.Failure, corev1.ConditionUnknown: checkup.Unknown, "": checkup.Unknown,
	} {
		namespace := recordsNamespace()
		if status != "" {
			namespace.Status.Conditions = []corev1.NamespaceCondition{{Type: telemetry.ConditionSources, Status: status, Reason: "R", Message: "M"}}
		}
		e := examination{access: newAccess(t, namespace), now: now}
		if f := e.checkCondition(t.Context(), telemetry.ConditionSources); f.Status != want {
			t.Errorf("%q: %+v", status, f)
		}
	}
}

// Before enforcement kubeadm's bindings and missing policies are only a warning. Audit mode is a
// setting, or the argument that packaging/kubernetes-audit has.
func TestAuditModeWarns(t *testing.T) {
	for name, c := range map[string]struct {
		setting string
		args    []string
		audit   bool
	}{
		"enforces":     {"", []string{"--config=/etc/config.yaml"}, false},
		"setting":      {"audit: true\n", nil, true},
		"argument":     {"", []string{"--config=/etc/config.yaml", "--audit"}, true},
		"with a value": {"", []string{"--audit=true"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			meta := metav1.ObjectMeta{Namespace: defaultNamespace, Name: configMapName}
			deployment := &appsv1.Deployment{ObjectMeta: meta}
			deployment.Spec.Template.Spec.Containers = []corev1.Container{{Name: "controller", Args: c.args}}
			e := examination{now: now, access: newAccess(t,
				&corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{configKey: goodConfig + c.setting}}, deployment, autoApproving(),
			)}
			want := map[string]checkup.Status{"configuration": checkup.OK, "policies": checkup.Failure, "bindings": checkup.Failure}
			if c.audit {
				want = map[string]checkup.Status{"configuration": checkup.Warning, "policies": checkup.Warning, "bindings": checkup.Warning}
			}
			report, err := e.run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, check := range report.Checks {
				if state, ok := want[check.Name]; ok && check.Status != state {
					t.Errorf("%+v", check)
				}
			}
		})
	}
}

// In audit mode the release's policies keep every node out. That is a failure, with a remedy.
func TestPoliciesInAuditModeFail(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: defaultNamespace, Name: configMapName}
	objects := []client.Object{&corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{configKey: goodConfig + "audit: true\n"}}, &appsv1.Deployment{ObjectMeta: meta}}
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(packaging.Policies), 4096)
	for {
		object := &unstructured.Unstructured{}
		err := decoder.Decode(object)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if object.Object != nil {
			objects = append(objects, object)
		}
	}
	report, err := (&examination{now: now, access: newAccess(t, objects...)}).run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	policies := report.Checks[slices.IndexFunc(report.Checks, func(r checkup.Result) bool { return r.Name == "policies" })]
	if policies.Status != checkup.Failure || !strings.Contains(policies.Message, "no node gets a certificate") || !strings.Contains(policies.Remedy, "kubectl delete --filename=packaging/kubernetes/policies.yaml") {
		t.Errorf("%+v", policies)
	}
}

// What goes wrong before any command has its exit code, and says what can be done.
func TestErrors(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "kubeconfig")
	long := filepath.Join(t.TempDir(), "long")
	if err := errors.Join(os.WriteFile(empty, nil, 0o600), os.WriteFile(long, bytes.Repeat([]byte("#"), maxKubeconfig+1), 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"nobody there":        {[]string{"status", "--kubeconfig=" + empty, "--server=https://127.0.0.1:1"}, codeAPIUnreachable, "hint: is it the right cluster?"},
		"no such file":        {[]string{"status", "--kubeconfig=" + empty + "x"}, codeUsage, "hint: see --help"},
		"a format":            {[]string{"status", "-o", "table"}, codeUsage, "must be one of wide, json, yaml"},
		"a command":           {[]string{"statsu"}, codeUsage, "did you mean status?"},
		"a flag":              {[]string{"status", "--selektor=x"}, codeUsage, "did you mean --selector?"},
		"a watched format":    {[]string{"status", "--watch", "-o", "json"}, codeUsage, "--output may be wide"},
		"no workload cluster": {[]string{"status", "--workload-kubeconfig=" + empty}, codeUsage, "needs --workload-cluster"},
		"a long kubeconfig": {[]string{
			"status", "--kubeconfig=" + empty, "--server=https://127.0.0.1:1", "--workload-cluster=c", "--workload-kubeconfig=" + long,
		}, codeUsage, "longer than 1048576 bytes"},
		"no command of that name": {[]string{"stat"}, codeUsage, "unknown command"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			code := Program{}.Run(t.Context(), Process{Args: c.args, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr, Getenv: os.Getenv})
			result{code, stdout.String(), stderr.String()}.want(t, c.code, c.says)
		})
	}
}

// Node names are completed by the records.
func TestCompletion(t *testing.T) {
	run(t, newAccess(t, fleet()...), "__complete", "reset", "").want(t, 0, "worker-1\nworker-2\n:4")
	run(t, newAccess(t), "__complete", "pending", "-o", "").want(t, 0, "inventory\njson\nyaml\n:4")
}

// Records of another cluster in the same namespace are not shown.
func TestRecordsOfOneCluster(t *testing.T) {
	own, other := newRecord("own", 1), newRecord("other", 2)
	own.Labels, other.Labels = map[string]string{clusterv1.ClusterNameLabel: "one"}, map[string]string{clusterv1.ClusterNameLabel: "two"}
	a := newAccess(t, own, other)
	a.cluster = "one"
	r := run(t, a, "status")
	if r.want(t, 0, "own"); strings.Contains(r.stdout, "other") {
		t.Errorf("%s", r.stdout)
	}
	run(t, a, "reset", "other", "--yes").want(t, codeNotFound)
}

// The controller says nothing about a paused Cluster, so check does.
func TestCheckCluster(t *testing.T) {
	bySpec, byAnnotation, served := &clusterv1.Cluster{}, &clusterv1.Cluster{}, &clusterv1.Cluster{}
	for name, object := range map[string]*clusterv1.Cluster{"spec": bySpec, "annotation": byAnnotation, "served": served} {
		object.Namespace, object.Name = defaultNamespace, name
	}
	bySpec.Spec.Paused = new(true)
	byAnnotation.Annotations = map[string]string{clusterv1.PausedAnnotation: ""}
	a := newAccess(t, bySpec, byAnnotation, served)
	for name, state := range map[string]checkup.Status{"spec": checkup.Failure, "annotation": checkup.Failure, "served": checkup.OK, "missing": checkup.Failure} {
		a.cluster = name
		if f := (&examination{access: a, now: now}).checkCluster(t.Context()); f.Status != state || strings.Contains(f.Message, "is paused") != (name == "spec" || name == "annotation") {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// A flood of claims hides no record, and is not printed whole.
func TestFloodIsBounded(t *testing.T) {
	s := &Status{}
	requests := make([]Request, 2000)
	for i := range requests {
		requests[i] = Request{Name: fmt.Sprint(i), State: "Pending", NodeName: fmt.Sprintf("a-%04d", i)}
	}
	s.fill([]v1alpha1.NodeAttestation{*newRecord("zzz", 1)}, requests, now)
	if len(s.Nodes) != 1+maxClaims || s.Omitted != 2000-maxClaims || s.Nodes[0].Node != "zzz" {
		t.Errorf("%d, %d omitted, first %s", len(s.Nodes), s.Omitted, s.Nodes[0].Node)
	}
	if p := newPending(newest(requests, (*Request).Waits)); len(p.Requests) != maxClaims || p.Omitted != 2000-maxClaims {
		t.Errorf("%d, %d omitted", len(p.Requests), p.Omitted)
	}
}

// openTerminal returns both ends of a pseudo terminal.
func openTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = master.Close() })
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	if slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = slave.Close() })
	return master, slave
}

// On a terminal it asks, and only "yes" is a yes.
func TestResetAsks(t *testing.T) {
	for answer, code := range map[string]int{"yes\n": 0, "no\n": codeNotConfirmed, "\n": codeNotConfirmed, "y\n": codeNotConfirmed, "worker-1\n": codeNotConfirmed} {
		master, slave := openTerminal(t)
		if _, err := master.WriteString(answer); err != nil {
			t.Fatal(err)
		}
		record := newRecord("worker-1", 1)
		a := newAccess(t, record)
		var stdout, stderr bytes.Buffer
		program := Program{access: a, now: func() time.Time { return now }}
		got := program.Run(t.Context(), Process{Args: []string{"reset", "worker-1"}, Stdin: slave, Stdout: &stdout, Stderr: &stderr, Getenv: os.Getenv})
		gone := apierrors.IsNotFound(a.records.Get(t.Context(), client.ObjectKeyFromObject(record), record))
		if got != code || gone != (code == 0) || !strings.Contains(stderr.String(), "Reset node worker-1? Type yes: ") {
			t.Errorf("%q: exit code %d, deleted: %t\n%s", answer, got, gone, stderr.String())
		}
	}
}

// Colours are for terminals.
func TestColours(t *testing.T) {
	if (&invocation{Process: Process{Stdout: &bytes.Buffer{}, Getenv: func(string) string { return "" }}}).colors() {
		t.Error("a buffer has colours")
	}
	_, slave := openTerminal(t)
	for noColor, want := range map[string]bool{"": true, "1": false} {
		i := &invocation{Process: Process{Stdout: slave, Getenv: func(name string) string { return map[string]string{"NO_COLOR": noColor}[name] }}}
		if i.colors() != want {
			t.Errorf("NO_COLOR=%q: colours: %t", noColor, !want)
		}
	}
}

// The document shows what the commands print.
func TestDocument(t *testing.T) {
	data, err := os.ReadFile("../../docs/kubectl-attest.md")
	if err != nil {
		t.Fatal(err)
	}
	document := string(data)
	for _, name := range []string{"status.txt", "pending.txt", "pending-inventory.txt", "revoke.txt", "suspend.txt", "revocations.txt"} {
		golden, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(golden), "--- standard output\n")
		shown, _, _ := strings.Cut(rest, "--- standard error\n")
		if !strings.Contains(document, "```\n"+shown+"```\n") {
			t.Errorf("does not show %s:\n%s", name, shown)
		}
	}
	for _, check := range (&examination{access: &access{cluster: "c"}}).checks() {
		if !strings.Contains(document, "| `"+check.name+"` |") {
			t.Errorf("does not have the check %s", check.name)
		}
	}
	commands := (&invocation{flags: genericclioptions.NewConfigFlags(true)}).rootCommand()
	for _, c := range commands.Commands() {
		if !strings.Contains(document, "| `"+c.Name()) {
			t.Errorf("does not have the command %s", c.Name())
		}
	}
	for _, name := range []string{"revoke", "rotate"} {
		c, _, err := commands.Find([]string{name})
		if err != nil {
			t.Fatal(err)
		}
		c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
			if !strings.Contains(document, "--"+f.Name) {
				t.Errorf("does not have the flag --%s of %s", f.Name, name)
			}
			if value := strings.TrimSuffix(strings.TrimSuffix(f.DefValue, "0s"), "0m"); strings.HasSuffix(f.DefValue, "0s") && f.DefValue != "0s" && !strings.Contains(document, "`"+value) {
				t.Errorf("does not have the default %s of --%s", value, f.Name)
			}
		})
	}
	for _, group := range []string{"viewers", "operators", "suspenders", "evictors"} {
		if !strings.Contains(document, "| `node-attestation-"+group+"` |") {
			t.Errorf("does not have the group %s", group)
		}
	}
	for _, code := range []int{codeUnexpected, codeUsage, codeAPIUnreachable, codeAPIRefused, codeCheckFailed, codeCheckUnknown, codeNotFound, codeNotConfirmed, codeTimeout, codeNotInForce} {
		if !strings.Contains(document, fmt.Sprintf("| %d | ", code)) {
			t.Errorf("does not have exit code %d", code)
		}
	}
}

// newCA returns a CA's certificate and key in PEM.
func newCA(n byte, end time.Time) (certificate, key []byte) {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(int64(n)), Subject: pkix.Name{CommonName: fmt.Sprintf("ca-%d", n)}, NotBefore: now.Add(-time.Hour), NotAfter: end,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := must(x509.CreateCertificate(rand.Reader, template, template, keyOf(n).Public(), keyOf(n)))
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: must(x509.MarshalPKCS8PrivateKey(keyOf(n)))})
}

func TestCAIsCompared(t *testing.T) {
	year := now.Add(365 * 24 * time.Hour)
	certificate, key := newCA(1, year)
	soon, soonKey := newCA(3, now.Add(24*time.Hour))
	other, otherKey := newCA(2, year)
	for name, c := range map[string]struct {
		certificate, key []byte
		trusted          string
		want             checkup.Status
		says             string
	}{
		"trusted":            {certificate, key, string(certificate), checkup.OK, "trusts the CA"},
		"one of several":     {certificate, key, string(other) + string(certificate), checkup.OK, "trusts the CA"},
		"not trusted":        {certificate, key, string(other), checkup.Failure, "does not trust"},
		"ends soon":          {soon, soonKey, string(soon), checkup.Warning, "ends at"},
		"of another key":     {certificate, otherKey, string(certificate), checkup.Failure, "signing CA"},
		"nothing is trusted": {certificate, key, "", checkup.Unknown, "client-ca-file"},
	} {
		t.Run(name, func(t *testing.T) {
			e := examination{now: now, access: newAccess(t,
				&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: configMapName}, Data: map[string]string{configKey: goodConfig}},
				&corev1.Secret{
					ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: "node-attestation-ca"},
					Data:       map[string][]byte{corev1.TLSCertKey: c.certificate, corev1.TLSPrivateKeyKey: c.key},
				},
				&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clientCA.Namespace, Name: clientCA.Name}, Data: map[string]string{"client-ca-file": c.trusted}},
			)}
			e.checkConfiguration(t.Context())
			if f := e.checkCA(t.Context()); f.Status != c.want || !strings.Contains(f.Message, c.says) {
				t.Errorf("%+v", f)
			}
		})
	}
}

func TestControllerIsChecked(t *testing.T) {
	for ready, want := range map[int32]checkup.Status{0: checkup.Failure, 1: checkup.Warning, 2: checkup.OK} {
		e := examination{now: now, access: newAccess(t, &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: telemetry.Component},
			Spec:       appsv1.DeploymentSpec{Replicas: new(int32(2))}, Status: appsv1.DeploymentStatus{ReadyReplicas: ready},
		})}
		if f := e.checkController(t.Context()); f.Status != want {
			t.Errorf("%d ready: %+v", ready, f)
		}
	}
	for name, c := range map[string]struct {
		holder  string
		renewed time.Duration
		want    checkup.Status
	}{
		"led": {"a", time.Second, checkup.OK}, "a clock that is behind": {"a", -time.Minute, checkup.OK},
		"led by nobody": {"", time.Second, checkup.Failure}, "not renewed": {"a", 5 * time.Minute, checkup.Failure},
	} {
		renewed := metav1.NewMicroTime(now.Add(-c.renewed))
		e := examination{now: now, access: newAccess(t, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: telemetry.Component},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &c.holder, RenewTime: &renewed, LeaseDurationSeconds: new(int32(15))},
		})}
		if f := e.checkLease(t.Context()); f.Status != c.want {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// The record of a cloud's instance shows the instance. Its renewals are the node's, although
// nothing in them can be read here.
func TestInstanceIsShown(t *testing.T) {
	record := newRecord("worker-1", 1)
	record.Spec.Provider, record.Spec.Instance = "gce", &v1alpha1.Instance{Platform: "gce", ID: "2875949485074006138", Account: "some-project"}
	renewal := waits(request("node-csr-1", signerPrefix+"gce", "worker-1", "", []byte("{}")), "MachineNotFound", "not found")
	content := must(attestation.Parse(renewal.Spec.Request))
	content.Provider = "gce"
	renewal.Spec.Request = must(content.Marshal())
	renewal.Spec.Username = "system:node:worker-1"

	s := &Status{}
	rules := must(claims())
	claim, ours := rules.ParseClaim(renewal)
	if !ours || !slices.Contains(signers, renewal.Spec.SignerName) {
		t.Fatal("it is not a request of ours")
	}
	s.fill([]v1alpha1.NodeAttestation{*record}, []Request{newRequest(renewal, claim, now)}, now)
	if len(s.Nodes) != 1 || s.Nodes[0].Instance.ID != "2875949485074006138" || s.Nodes[0].Request != "node-csr-1" {
		t.Errorf("%+v", s.Nodes)
	}
	var out bytes.Buffer
	i := &invocation{}
	i.Stdout, i.now = &out, now
	if err := i.printNodes(s.Nodes, false, true); err != nil || !strings.Contains(out.String(), "2875949485074006138") {
		t.Errorf("%v, %s", err, out.String())
	}
}
