// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// clusterAPI is a fake API server with Nodes, records and one Secret.
type clusterAPI struct {
	client.Client
	nodes   []string
	records []v1alpha1.NodeAttestation
	// failNodes, failRecords and failSecret are returned as long as fails is not 0; it counts down,
	// and stays below 0.
	failNodes, failRecords, failSecret error
	fails, writes                      int
	secret                             *corev1.Secret
}

func (a *clusterAPI) failing(err error) error {
	if err == nil || a.fails == 0 {
		return nil
	}
	a.fails--
	return err
}

func (a *clusterAPI) List(_ context.Context, into client.ObjectList, options ...client.ListOption) error {
	var all client.ListOptions
	all.ApplyOptions(options)
	switch list := into.(type) {
	case *metav1.PartialObjectMetadataList:
		for _, name := range a.nodes {
			list.Items = append(list.Items, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
		return a.failing(a.failNodes)
	case *v1alpha1.NodeAttestationList:
		if all.Namespace != keySecret.Namespace {
			return fmt.Errorf("records in namespace %q", all.Namespace)
		}
		list.Items = a.records
		return a.failing(a.failRecords)
	}
	return fmt.Errorf("%T", into)
}

func (a *clusterAPI) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	if err := a.failing(a.failSecret); err != nil {
		return err
	}
	if a.secret == nil {
		return apierrors.NewNotFound(secretResource, key.Name)
	}
	a.secret.DeepCopyInto(into.(*corev1.Secret))
	return nil
}

func (a *clusterAPI) Create(_ context.Context, object client.Object, _ ...client.CreateOption) error {
	a.secret = object.DeepCopyObject().(*corev1.Secret)
	return nil
}

func (a *clusterAPI) Update(_ context.Context, object client.Object, _ ...client.UpdateOption) error {
	a.writes++
	a.secret = object.DeepCopyObject().(*corev1.Secret)
	return nil
}

var (
	keySecret      = types.NamespacedName{Namespace: "n", Name: "keys"}
	secretResource = schema.GroupResource{Resource: "secrets"}
)

func build(keys tpm.Keys) (*tpm.Verifier, error) {
	return tpm.New(tpm.Config{
		NamedEKs: true, ClusterUID: "c", Keys: keys, PCRs: attestation.PCRSelection{Bank: "sha256", Indexes: []int{7}},
	})
}

func newPreflight(api *clusterAPI, unattested ...string) *Preflight {
	return &Preflight{Keys: sources.NewKeyStore(api, api, keySecret, build), Records: api, Cluster: "c", Namespace: keySecret.Namespace, Unattested: func() []string { return unattested }, Log: logr.Discard()}
}

func recordFor(cluster, node string) v1alpha1.NodeAttestation {
	return v1alpha1.NodeAttestation{Spec: v1alpha1.NodeAttestationSpec{Cluster: cluster, NodeName: node}}
}

func TestPreflight(t *testing.T) {
	forbidden := func(resource string) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("RBAC says no"))
	}
	noKind := &meta.NoKindMatchError{GroupKind: v1alpha1.GroupVersion.WithKind("NodeAttestation").GroupKind()}
	records := []v1alpha1.NodeAttestation{recordFor("c", "a"), recordFor("other", "b")}
	for name, c := range map[string]struct {
		api    clusterAPI
		listed []string
		nodes  []string
		says   []string
	}{
		"no Nodes":                   {clusterAPI{}, nil, nil, nil},
		"a record":                   {clusterAPI{nodes: []string{"a"}, records: records}, nil, nil, nil},
		"a record, and listed":       {clusterAPI{nodes: []string{"a", "b"}, records: records}, []string{"b", "nobody"}, nil, nil},
		"another cluster's record":   {clusterAPI{nodes: []string{"a", "b"}, records: records}, nil, []string{"b"}, []string{"1: b", "audit: true"}},
		"two":                        {clusterAPI{nodes: []string{"d", "c", "a"}, records: records}, nil, []string{"c", "d"}, []string{"2: c, d", "unattestedNodes"}},
		"no CRD, no Nodes":           {clusterAPI{failRecords: noKind, fails: -1}, nil, nil, nil},
		"no CRD, all listed":         {clusterAPI{nodes: []string{"a"}, failRecords: noKind, fails: -1}, []string{"a"}, nil, nil},
		"no CRD":                     {clusterAPI{nodes: []string{"a"}, failRecords: noKind, fails: -1}, nil, nil, []string{"crd.yaml"}},
		"Nodes are forbidden":        {clusterAPI{failNodes: forbidden("nodes"), fails: -1}, nil, nil, []string{"nodes: ", "rbac.yaml"}},
		"records are forbidden":      {clusterAPI{nodes: []string{"a"}, failRecords: forbidden("nodeattestations"), fails: -1}, nil, nil, []string{"records: ", "rbac.yaml"}},
		"the Secret is forbidden":    {clusterAPI{failSecret: forbidden("secrets"), fails: -1}, nil, nil, []string{"secret n/keys: ", "rbac.yaml"}},
		"unreachable, and then not":  {clusterAPI{nodes: []string{"a"}, records: records, failNodes: errors.New("connection refused"), fails: 5}, nil, nil, nil},
		"unreachable, and then none": {clusterAPI{nodes: []string{"b"}, failSecret: errors.New("connection refused"), fails: 5}, nil, []string{"b"}, []string{"1: b"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				err := newPreflight(&c.api, c.listed...).Await(t.Context())
				var refused *Error
				switch {
				case len(c.says) == 0:
					if err != nil || !enforcing(c.api.secret) || len(c.api.secret.Data) != 2 {
						t.Errorf("%v, %v", err, c.api.secret)
					}
					return
				case !errors.As(err, &refused) || !slices.Equal(refused.Nodes, c.nodes) || c.api.secret != nil && enforcing(c.api.secret):
					t.Fatalf("%v, %v", err, c.api.secret)
				}
				for _, says := range c.says {
					if !strings.Contains(err.Error()+"\n"+refused.Hint, says) {
						t.Errorf("does not say %q: %v, %s", says, err, refused.Hint)
					}
				}
				// In audit mode the same problem is a warning.
				var warned strings.Builder
				preflight := newPreflight(&c.api, c.listed...)
				preflight.Audit, preflight.Log = true, funcr.New(func(_, args string) { warned.WriteString(args) }, funcr.Options{})
				if err := preflight.Await(t.Context()); err != nil || warned.Len() == 0 {
					t.Errorf("%v, %q", err, warned.String())
				}
			})
		})
	}
}

// An API server that does not answer is no refusal. The wait for it is bounded.
func TestPreflightGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &clusterAPI{failSecret: errors.New("connection refused"), fails: -1}
		preflight, began := newPreflight(api), time.Now()
		err := preflight.Await(t.Context())
		var refused *Error
		if err == nil || errors.As(err, &refused) || !errors.Is(err, api.failSecret) || time.Since(began) != awaitTimeout {
			t.Errorf("%v after %s", err, time.Since(began))
		}
		preflight.Audit = true
		if err := preflight.Await(t.Context()); err != nil {
			t.Errorf("in audit mode: %v", err)
		}
	})
}

// After the start of enforcement, problems are only warnings, until a start in audit mode.
func TestPreflightRemembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const other = "example.com/other"
		api := &clusterAPI{nodes: []string{"a"}, records: []v1alpha1.NodeAttestation{recordFor("c", "a")}, secret: &corev1.Secret{}}
		// not a time, so written by another program
		api.secret.Annotations = map[string]string{AnnotationEnforcingSince: "yes", other: "x"}
		open := func(audit bool) error {
			t.Helper()
			preflight := newPreflight(api)
			preflight.Audit = audit
			return preflight.Await(t.Context())
		}
		if err := open(false); err != nil {
			t.Fatal(err)
		}
		since, data := api.secret.Annotations[AnnotationEnforcingSince], api.secret.Data
		if _, err := time.Parse(time.RFC3339, since); err != nil || api.secret.Annotations[other] != "x" || len(data) != 2 {
			t.Fatalf("%v", api.secret)
		}
		api.nodes, api.writes = []string{"a", "stray"}, 0
		time.Sleep(time.Hour)
		if err := open(false); err != nil {
			t.Error(err)
		}
		api.failNodes, api.fails = apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", errors.New("RBAC says no")), -1
		if err := open(false); err != nil {
			t.Error(err)
		}
		api.fails = 0
		if api.secret.Annotations[AnnotationEnforcingSince] != since || api.writes != 0 {
			t.Errorf("%d writes, since %s, then %s", api.writes, since, api.secret.Annotations[AnnotationEnforcingSince])
		}
		if err := open(true); err != nil || enforcing(api.secret) || api.secret.Annotations[other] != "x" || api.writes != 1 {
			t.Errorf("%v, %v", err, api.secret)
		}
		if err := open(false); err == nil {
			t.Error("after an audit it was not checked again")
		}
		if fmt.Sprint(api.secret.Data) != fmt.Sprint(data) {
			t.Error("the keys are others")
		}
	})
}

func TestPreflightNamesTheFirst(t *testing.T) {
	var nodes []string
	for i := range 37 {
		nodes = append(nodes, fmt.Sprintf("node-%02d", i))
	}
	err := (&Error{Nodes: nodes}).Error()
	if !strings.Contains(err, "37: node-00, ") || !strings.Contains(err, ", node-19 and 17 more") || strings.Contains(err, "node-20") {
		t.Error(err)
	}
	if err := (&Error{Nodes: nodes[:20]}).Error(); !strings.HasSuffix(err, ", node-19") {
		t.Error(err)
	}
}

// rounds returns other Nodes at each call.
type rounds struct {
	clusterAPI
	nodes [][]string
}

func (r *rounds) List(ctx context.Context, into client.ObjectList, options ...client.ListOption) error {
	if _, nodes := into.(*metav1.PartialObjectMetadataList); nodes {
		r.clusterAPI.nodes, r.nodes = r.nodes[0], r.nodes[1:]
	}
	return r.clusterAPI.List(ctx, into, options...)
}

// The Nodes are checked again, and logged when they have changed.
func TestPreflightKeepsLooking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &rounds{nodes: [][]string{{"a"}, {"a"}, {"a", "b"}, {"a", "b"}, nil, nil}}
		looks := time.Duration(len(api.nodes))
		var said []string
		preflight := newPreflight(&api.clusterAPI)
		preflight.Keys, preflight.Records = sources.NewKeyStore(api, api, keySecret, build), api
		preflight.Log = funcr.New(func(_, args string) { said = append(said, args) }, funcr.Options{})
		ctx, cancel := context.WithTimeout(t.Context(), looks*nodesInterval-time.Second)
		defer cancel()
		if err := preflight.Start(ctx); err != nil || len(api.nodes) > 0 {
			t.Errorf("%v, %d looks short", err, len(api.nodes))
		}
		if len(said) != 3 || !strings.Contains(said[0], "1: a") || !strings.Contains(said[1], "2: a, b") || !strings.Contains(said[2], "each Node") {
			t.Errorf("%q", said)
		}
	})
}

// The log says at first, and after each change, whether a Node would be locked out.
func TestNodesAreLogged(t *testing.T) {
	var lines []string
	api := &clusterAPI{nodes: []string{"a"}}
	p := newPreflight(api, "a")
	p.Log = funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{})
	for _, nodes := range [][]string{{"a"}, {"a"}, {"a", "b"}, {"a", "b"}, {"a"}} {
		api.nodes = nodes
		if err := p.check(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	const none, some = "each Node has a record or is listed", "Nodes have no record and are not in unattestedNodes"
	if len(lines) != 3 || !strings.Contains(lines[0], none) || !strings.Contains(lines[1], some) || !strings.Contains(lines[2], none) {
		t.Errorf("%q", lines)
	}
}
