// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The tests of decisions run a Controller against a server in memory, inside a synctest bubble. The
// rules, the informers and all waits use the clock of the bubble.

const (
	tpmSigner     = "example.com/tpm"
	acmeSigner    = "example.com/acme"
	kubeletSigner = certificatesv1.KubeAPIServerClientKubeletSignerName
	servingSigner = certificatesv1.KubeletServingSignerName
	oursToServe   = "example.com/serving"
	testNamespace = "attestation"
	testCluster   = "c"
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// call is what a controller asks of the API server.
type call struct{ verb, resource, name string }

func (c call) String() string { return c.verb + " " + c.resource }

func (c call) writes() bool { return c.verb != "get" && c.verb != "list" }

const (
	requestsResource = "certificatesigningrequests"
	recordsResource  = "nodeattestations"
)

func resourceOf(object any) string {
	switch object := object.(type) {
	case *certificatesv1.CertificateSigningRequest:
		return requestsResource
	case *v1alpha1.NodeAttestation, *v1alpha1.NodeAttestationList:
		return recordsResource
	case *metav1.PartialObjectMetadata:
		return strings.ToLower(object.Kind) + "s"
	}
	return fmt.Sprintf("%T", object)
}

var testScheme = sync.OnceValue(func() *runtime.Scheme {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{certificatesv1.AddToScheme, corev1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			panic(err)
		}
	}
	return scheme
})

// server is controller-runtime's fake client, and adds what an API server has beside it. It adds
// UIDs, times, the subresource approval, immutable certificates and record fields, and a watch that
// can hang. It checks each write for what must hold at any time. Requests are read and written
// without the fake client's JSON, which would take half of the tests' time.
type server struct {
	client.WithWatch
	tracker clienttesting.ObjectTracker
	mu      sync.Mutex
	created int
	// hung is closed when the watches of records go on. It is nil if they do not hang.
	hung chan struct{}
	// broken are the writes that must not happen.
	broken []string
}

func newServer() *server {
	scheme := testScheme()
	s := &server{tracker: clienttesting.NewObjectTracker(scheme, serializer.NewCodecFactory(scheme).UniversalDecoder())}
	builder := fake.NewClientBuilder().WithScheme(scheme).
		WithStatusSubresource(&certificatesv1.CertificateSigningRequest{}).
		WithObjectTracker(s.tracker)
	for field, value := range map[string]func(*v1alpha1.NodeAttestation) string{
		v1alpha1.FieldCluster:  func(r *v1alpha1.NodeAttestation) string { return r.Spec.Cluster },
		v1alpha1.FieldNodeName: func(r *v1alpha1.NodeAttestation) string { return r.Spec.NodeName },
		v1alpha1.FieldMachine:  func(r *v1alpha1.NodeAttestation) string { return r.Spec.Machine.Name },
		v1alpha1.FieldEK: func(r *v1alpha1.NodeAttestation) string {
			if r.Spec.EK == nil {
				return ""
			}
			return r.Spec.EK.Fingerprint
		},
		v1alpha1.FieldRequestUID: func(r *v1alpha1.NodeAttestation) string {
			if r.Status.Request == nil {
				return ""
			}
			return string(r.Status.Request.UID)
		},
	} {
		builder = builder.WithIndex(&v1alpha1.NodeAttestation{}, field, func(object client.Object) []string {
			return []string{value(object.(*v1alpha1.NodeAttestation))}
		})
	}
	s.WithWatch = interceptor.NewClient(builder.Build(), interceptor.Funcs{
		Get: s.get, Create: s.create, Update: s.update, SubResourcePatch: s.patchStatus, Watch: s.watch,
	})
	return s
}

var (
	requestsGVR = certificatesv1.SchemeGroupVersion.WithResource(requestsResource)
	requestsGVK = certificatesv1.SchemeGroupVersion.WithKind("CertificateSigningRequest")
)

func (s *server) get(ctx context.Context, api client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	request, ok := object.(*certificatesv1.CertificateSigningRequest)
	if !ok {
		return api.Get(ctx, key, object, options...)
	}
	found, err := s.tracker.Get(requestsGVR, "", key.Name) // a copy
	if err == nil {
		*request = *found.(*certificatesv1.CertificateSigningRequest)
	}
	return err
}

func (s *server) create(ctx context.Context, api client.WithWatch, object client.Object, options ...client.CreateOption) error {
	s.mu.Lock()
	s.created++
	uid := fmt.Sprintf("uid-%d", s.created)
	s.mu.Unlock()
	made := object.GetUID() == ""
	if made {
		object.SetUID(types.UID(uid))
	}
	object.SetCreationTimestamp(metav1.Now().Rfc3339Copy())
	err := api.Create(ctx, object, options...)
	if err != nil && made {
		object.SetUID("")
	}
	return err
}

// update refuses what the CRD does.
func (s *server) update(ctx context.Context, api client.WithWatch, object client.Object, options ...client.UpdateOption) error {
	if record, ok := object.(*v1alpha1.NodeAttestation); ok {
		before := &v1alpha1.NodeAttestation{}
		if err := api.Get(ctx, client.ObjectKeyFromObject(object), before); err != nil {
			return err
		}
		if before.UID != record.UID {
			return apierrors.NewConflict(v1alpha1.Resource.GroupResource(), record.Name, errors.New("another UID"))
		}
		if before.Spec.Cluster != record.Spec.Cluster || before.Spec.Machine != record.Spec.Machine || before.Spec.NodeName != record.Spec.NodeName {
			return apierrors.NewInvalid(v1alpha1.GroupVersion.WithKind("NodeAttestation").GroupKind(), record.Name, nil)
		}
	}
	return api.Update(ctx, object, options...)
}

// patchStatus has approval change the conditions alone, and status the certificate alone.
func (s *server) patchStatus(ctx context.Context, _ client.Client, subresource string, object client.Object, patch client.Patch, _ ...client.SubResourcePatchOption) error {
	data, err := patch.Data(object)
	if err != nil {
		return err
	}
	var content struct {
		Metadata struct {
			UID             types.UID
			ResourceVersion string
		}
		Status certificatesv1.CertificateSigningRequestStatus
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&content); err != nil || patch.Type() != types.MergePatchType || content.Metadata.ResourceVersion == "" {
		return apierrors.NewBadRequest("not a merge patch of the status of one version")
	}
	before := &certificatesv1.CertificateSigningRequest{}
	if err := s.Get(ctx, client.ObjectKeyFromObject(object), before); err != nil {
		return err
	}
	version, err := strconv.Atoi(before.ResourceVersion)
	if err != nil {
		return err
	}
	after := before.DeepCopy()
	after.ResourceVersion = strconv.Itoa(version + 1)
	switch uid := content.Metadata.UID; {
	case content.Metadata.ResourceVersion != before.ResourceVersion, uid != "" && uid != before.UID:
		return apierrors.NewConflict(requestsGVR.GroupResource(), before.Name, errors.New("another version"))
	case subresource == "status" && len(before.Status.Certificate) > 0:
		return apierrors.NewInvalid(requestsGVK.GroupKind(), before.Name, nil)
	case subresource == "status":
		after.Status.Certificate = content.Status.Certificate
	default:
		after.Status.Conditions = content.Status.Conditions
	}
	for i := range after.Status.Conditions {
		if c := &after.Status.Conditions[i]; c.LastUpdateTime.IsZero() {
			c.LastUpdateTime = metav1.Now().Rfc3339Copy()
		}
	}
	if err := s.tracker.Update(requestsGVR, after, ""); err != nil {
		return err
	}
	s.check(ctx, before, after)
	*object.(*certificatesv1.CertificateSigningRequest) = *after
	return nil
}

// check records forbidden writes. These are an approval when no record names the request, a second
// approval for a node, and a certificate that is not in the record.
func (s *server) check(ctx context.Context, before, after *certificatesv1.CertificateSigningRequest) {
	approves := csrstate.Of(before) == csrstate.Pending && csrstate.Of(after) == csrstate.Approved && after.Status.Conditions[0].Reason == string(act.ReasonApproved)
	issues := len(before.Status.Certificate) == 0 && len(after.Status.Certificate) > 0 && !slices.Contains(after.Spec.Usages, certificatesv1.UsageServerAuth)
	if !approves && !issues {
		return
	}
	list := &v1alpha1.NodeAttestationList{}
	if err := s.List(ctx, list); err != nil {
		s.violated("%v", err)
		return
	}
	if approves {
		if !slices.ContainsFunc(list.Items, func(r v1alpha1.NodeAttestation) bool {
			return r.Status.Request != nil && r.Status.Request.UID == after.UID
		}) {
			s.violated("%s is approved, and no record names it", after.Name)
		}
		for _, other := range s.requests() {
			signed := slices.ContainsFunc(list.Items, func(r v1alpha1.NodeAttestation) bool { return records.HasCertificateFor(&r, other.UID) })
			if other.Name != after.Name && csrstate.Of(&other) == csrstate.Approved && !signed && nodeIn(&other) == nodeIn(after) {
				s.violated("%s is approved beside %s, which has no certificate yet", after.Name, other.Name)
			}
		}
	}
	if issues {
		fingerprint, err := signing.Fingerprint(after.Status.Certificate)
		if err != nil || !slices.ContainsFunc(list.Items, func(r v1alpha1.NodeAttestation) bool {
			return slices.ContainsFunc(r.Status.Certificates, func(c v1alpha1.IssuedCertificate) bool {
				return c.SHA256 == fingerprint && c.RequestUID == after.UID
			})
		}) {
			s.violated("the certificate of %s is published, and no record has it: %v", after.Name, err)
		}
	}
}

func (s *server) violated(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = append(s.broken, fmt.Sprintf(format, args...))
}

// nodeIn returns the common name that a request asks for.
func nodeIn(request *certificatesv1.CertificateSigningRequest) string {
	content, err := attestation.Parse(request.Spec.Request)
	if err != nil {
		return request.Name
	}
	return must(x509.ParseCertificateRequest(content.PKCS10)).Subject.CommonName
}

// heldWatch withholds events while the server's watches hang.
type heldWatch struct {
	watch.Interface
	events  chan watch.Event
	stopped chan struct{}
	once    sync.Once
}

func (w *heldWatch) ResultChan() <-chan watch.Event { return w.events }

func (w *heldWatch) Stop() {
	w.once.Do(func() { close(w.stopped) })
	w.Interface.Stop()
}

func (s *server) watch(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) (watch.Interface, error) {
	events, err := api.Watch(ctx, list, options...)
	if err != nil {
		return nil, err
	}
	w := &heldWatch{Interface: events, events: make(chan watch.Event), stopped: make(chan struct{})}
	go func() {
		defer close(w.events)
		for event := range events.ResultChan() {
			s.mu.Lock()
			hung := s.hung
			s.mu.Unlock()
			if hung != nil {
				select {
				case <-hung:
				case <-w.stopped:
					return
				}
			}
			select {
			case w.events <- event:
			case <-w.stopped:
				return
			}
		}
	}()
	return w, nil
}

// hang has the watches of records hang.
func (s *server) hang() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hung = make(chan struct{})
}

// goOn has the watches of records go on.
func (s *server) goOn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.hung)
	s.hung = nil
}

func (s *server) requests() []certificatesv1.CertificateSigningRequest {
	list, err := s.tracker.List(requestsGVR, requestsGVK, "")
	if err != nil {
		panic(err)
	}
	return list.(*certificatesv1.CertificateSigningRequestList).Items
}

// connection is one controller's way to the server. It counts the calls of decisions. Those of the
// records' informer do not count.
type connection struct {
	client.WithWatch
	mu    sync.Mutex
	calls []call
	// intercept is what happens in place of a call: run is the call, and i counts calls from 0.
	// Nil: the call happens.
	intercept func(i int, c call, run func() error) error
}

// IsWatchListSemanticsUnSupported tells the informer that the fake client streams no first state.
func (*connection) IsWatchListSemanticsUnSupported() bool { return true }

func (n *connection) do(c call, run func() error) error {
	n.mu.Lock()
	i := len(n.calls)
	n.calls = append(n.calls, c)
	intercept := n.intercept
	n.mu.Unlock()
	if intercept == nil {
		return run()
	}
	return intercept(i, c, run)
}

// made returns the calls so far.
func (n *connection) made() []call {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.calls)
}

// counted returns how many calls there were of each kind, and forgets them.
func (n *connection) counted() map[string]int {
	n.mu.Lock()
	defer n.mu.Unlock()
	counts := map[string]int{}
	for _, c := range n.calls {
		counts[c.String()]++
	}
	n.calls = nil
	return counts
}

func (s *server) connect() *connection {
	n := &connection{}
	n.WithWatch = interceptor.NewClient(s.WithWatch, interceptor.Funcs{
		Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
			return n.do(call{"get", resourceOf(object), key.Name}, func() error { return api.Get(ctx, key, object, options...) })
		},
		List: func(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if applied := (&client.ListOptions{}).ApplyOptions(options); applied.Raw != nil {
				err := api.List(ctx, list, options...)
				list.SetResourceVersion("1") // the fake client's lists have none
				return err
			}
			return n.do(call{"list", resourceOf(list), ""}, func() error { return api.List(ctx, list, options...) })
		},
		Create: func(ctx context.Context, api client.WithWatch, object client.Object, options ...client.CreateOption) error {
			return n.do(call{"create", resourceOf(object), object.GetName()}, func() error { return api.Create(ctx, object, options...) })
		},
		Update: func(ctx context.Context, api client.WithWatch, object client.Object, options ...client.UpdateOption) error {
			return n.do(call{"update", resourceOf(object), object.GetName()}, func() error { return api.Update(ctx, object, options...) })
		},
		Patch: func(ctx context.Context, api client.WithWatch, object client.Object, patch client.Patch, options ...client.PatchOption) error {
			return n.do(call{"patch", resourceOf(object), object.GetName()}, func() error { return api.Patch(ctx, object, patch, options...) })
		},
		SubResourcePatch: func(ctx context.Context, api client.Client, subresource string, object client.Object, patch client.Patch, options ...client.SubResourcePatchOption) error {
			return n.do(call{"patch", resourceOf(object) + "/" + subresource, object.GetName()}, func() error {
				return api.SubResource(subresource).Patch(ctx, object, patch, options...)
			})
		},
	})
	return n
}

// cachedClient reads requests as a RequestCache holds them. It writes as its connection does.
type cachedClient struct {
	*connection
	server   *server
	requests *intake.RequestCache
	// stale are requests of which the cache has this version.
	stale map[string]*certificatesv1.CertificateSigningRequest
}

func (c *cachedClient) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	request, ok := object.(*certificatesv1.CertificateSigningRequest)
	if !ok {
		return c.connection.Get(ctx, key, object, options...)
	}
	if kept := c.stale[key.Name]; kept != nil {
		kept.DeepCopyInto(request)
		return nil
	}
	whole := &certificatesv1.CertificateSigningRequest{}
	if err := c.server.Get(ctx, key, whole); err != nil {
		return err
	}
	c.requests.Reduce(whole).DeepCopyInto(request)
	return nil
}

// document is the evidence of the kit's providers: it says what to make of it.
type document struct {
	// EK is that of a hello. A proof has its hello's.
	EK string `json:"ek,omitempty"`
	// Hello is the name of the hello that a proof refers to.
	Hello string `json:"hello,omitempty"`
	// Machine is the machine that evidence of one round names, and For the request that it is for.
	Machine string `json:"machine,omitempty"`
	For     string `json:"for,omitempty"`
	// Refused is the reason for which the evidence is refused, and Unavailable says that it cannot
	// be judged now.
	Refused     verifier.Reason `json:"refused,omitempty"`
	Unavailable bool            `json:"unavailable,omitempty"`
	// Boot is how often the TPM was reset.
	Boot uint32 `json:"boot,omitempty"`
}

func documentOf(request *certificatesv1.CertificateSigningRequest) (d document, err error) {
	content, err := attestation.Parse(request.Spec.Request)
	if err != nil {
		return d, err
	}
	return d, json.Unmarshal(content.Data, &d)
}

func (d document) err() error {
	switch {
	case d.Refused != "":
		return verifier.Refusals{{Reason: d.Refused, Message: "so says the document"}}
	case d.Unavailable:
		return errors.New("a source of the evidence does not answer")
	}
	return nil
}

// tpmStub is a provider of two rounds. It counts what it judges.
type tpmStub struct {
	mu     sync.Mutex
	judged int
	// vouched says that something must name an EK.
	vouched bool
	// lifetime is how long a challenge lasts.
	lifetime time.Duration
}

func (*tpmStub) Name() string { return "tpm" }

func (p *tpmStub) Verify(_ context.Context, q evidence.Question) verifier.Evidence {
	p.mu.Lock()
	p.judged++
	p.mu.Unlock()
	d, err := documentOf(q.Request)
	switch {
	case err != nil:
		err = verifier.Refusals{{Reason: verifier.ReasonMalformedRequest, Message: err.Error()}}
	case d.err() != nil:
		err = d.err()
	case !attestation.IsHelloSigner(q.Request.Spec.SignerName) && q.Hello == nil:
		err = errors.New("the hello is not known")
	}
	target := tpmSigner
	if attestation.IsRehearsalSigner(q.Request.Spec.SignerName) {
		target = attestation.RehearsalSignerName
	}
	judged := verifier.Evidence{Provider: p.Name(), EK: p.EK(q.Request, q.Hello), SignerName: target, Err: err}
	if err != nil && !evidence.IsVerdict(err) && attestation.IsHelloSigner(q.Request.Spec.SignerName) {
		judged.EK = "" // as without challenge keys
	}
	if d.Boot > 0 {
		judged.Boot = &verifier.Boot{Resets: d.Boot}
	}
	if p.vouched && !q.Named && err == nil {
		judged.Err, judged.EKUntrusted = verifier.Refusals{{Reason: "AttestationEKUntrusted", Message: "nothing vouches for it"}}, true
	}
	return judged
}

func (*tpmStub) EK(request, hello *certificatesv1.CertificateSigningRequest) string {
	if !attestation.IsHelloSigner(request.Spec.SignerName) {
		request = hello
	}
	if request == nil {
		return ""
	}
	d, _ := documentOf(request)
	return d.EK
}

func (p *tpmStub) EKTemplate(request, hello *certificatesv1.CertificateSigningRequest) string {
	return "template-of-" + p.EK(request, hello)
}

// OriginAK takes the origin for the AK.
func (*tpmStub) OriginAK(origin string, _ *certificatesv1.CertificateSigningRequest) string {
	return origin
}

func (*tpmStub) HelloOf(proof *certificatesv1.CertificateSigningRequest) (string, error) {
	d, err := documentOf(proof)
	return d.Hello, err
}

func (p *tpmStub) Challenge(_ *certificatesv1.CertificateSigningRequest, _ bool, now time.Time) (string, time.Time, error) {
	expires := now.Add(p.lifetime)
	value, err := challengeUntil(expires)
	return value, expires, err
}

func challengeUntil(expires time.Time) (string, error) {
	value, err := attestation.Challenge{
		Version: attestation.VersionTPM, KeyID: "k", Expires: expires.Unix(), CredentialBlob: []byte("c"), EncryptedSecret: []byte("s"),
		PCRs: attestation.PCRSelection{Bank: "sha256", Indexes: []int{7}},
	}.Marshal()
	return string(value), err
}

func (*tpmStub) Versions() attestation.Versions { return attestation.Versions{attestation.VersionTPM} }

func (p *tpmStub) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.judged
}

// acmeStub is the signer behind a provider of one round.
type acmeStub struct{}

func (acmeStub) VerifyClientAttestationData(_ context.Context, request *certificatesv1.CertificateSigningRequest) error {
	d, err := documentOf(request)
	if err != nil {
		return err
	}
	return d.err()
}

func (acmeStub) VerifyServingAttestationData(context.Context, *certificatesv1.CertificateSigningRequest) error {
	return evidence.ErrNoServingEvidence
}

func (acmeStub) MachineName(_ context.Context, request *certificatesv1.CertificateSigningRequest) (string, error) {
	d, err := documentOf(request)
	return d.Machine, err
}

// machineList is a source of machines and tokens.
type machineList struct {
	mu     sync.Mutex
	list   []verifier.Machine
	tokens map[string]verifier.Token
	err    error
	reads  int
}

func (m *machineList) Machines(context.Context, time.Time) ([]verifier.Machine, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reads++
	return slices.Clone(m.list), m.err
}

func (m *machineList) Token(_ context.Context, id string, _ time.Time) (verifier.Token, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tokens[id], m.err
}

// set replaces the machines.
func (m *machineList) set(machines ...verifier.Machine) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.list = slices.Clone(machines)
}

// fail has the source return an error, or none.
func (m *machineList) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

func (m *machineList) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reads
}

// sharedList is the same, and lends its own slice.
type sharedList struct{ *machineList }

func (m sharedList) Shared(context.Context, time.Time) ([]verifier.Machine, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reads++
	return m.list, m.err
}

// machineNamed is a machine with that name, node name and EKs.
func machineNamed(name string, eks ...string) verifier.Machine {
	m := verifier.Machine{
		Ref: verifier.MachineRef{Name: name, UID: "of-" + name}, Ready: true, Created: time.Now(),
		Names: []verifier.NodeName{{Source: verifier.NameInventory, Value: name}},
	}
	for _, ek := range eks {
		m.EKs = append(m.EKs, verifier.NamedEK{Source: verifier.EKInventory, EK: ek})
	}
	return m
}

var nodeKey = sync.OnceValue(func() crypto.Signer { return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) })

var (
	pkcs10Lock sync.Mutex
	pkcs10s    = map[csr.Identity][]byte{}
)

// pkcs10For returns the certification request of a node, always the same: a proof has its hello's.
func pkcs10For(id csr.Identity) []byte {
	pkcs10Lock.Lock()
	defer pkcs10Lock.Unlock()
	if pkcs10s[id] == nil {
		pkcs10s[id] = must(csr.PKCS10(id, nodeKey()))
	}
	return pkcs10s[id]
}

// testCA signs for ten years from the beginning of a bubble's clock.
var testCA = sync.OnceValue(func() map[string][]byte {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	begin := time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: begin, NotAfter: begin.AddDate(11, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der := must(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))
	return map[string][]byte{
		"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		"tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: must(x509.MarshalPKCS8PrivateKey(key))}),
	}
})

// caInMemory is a source of the CA, which can be away.
type caInMemory struct {
	mu     sync.Mutex
	away   error
	parsed *signing.CA
}

func (s *caInMemory) CA(_ context.Context, now time.Time) (*signing.CA, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away != nil {
		return nil, s.away
	}
	if s.parsed != nil {
		return s.parsed, nil
	}
	var err error
	s.parsed, err = signing.FromSecret(testCA(), now)
	return s.parsed, err
}

func (s *caInMemory) leave(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = err
}

// journal has the Events and the log of a controller.
type journal struct {
	mu     sync.Mutex
	events []string
	lines  []string
	// decided are the outcomes that were reported.
	decided []string
}

func (j *journal) Eventf(regarding, _ runtime.Object, kind, reason, _, note string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	name := regarding.(metav1.Object).GetName()
	switch object := regarding.(type) {
	case *v1alpha1.NodeAttestation:
		name = "record/" + name
	case *metav1.PartialObjectMetadata:
		if object.Kind != "Node" {
			name = object.Kind + "/" + name
		}
	}
	j.events = append(j.events, fmt.Sprintf("%s %s on %s: %s", kind, reason, name, fmt.Sprintf(note, args...)))
}

func (*journal) Init(logr.RuntimeInfo)             {}
func (*journal) Enabled(int) bool                  { return true }
func (j *journal) WithValues(...any) logr.LogSink  { return j }
func (j *journal) WithName(string) logr.LogSink    { return j }
func (j *journal) Info(_ int, m string, kv ...any) { j.line(m, kv) }
func (j *journal) Error(err error, m string, kv ...any) {
	j.line(m, append(kv, "err", err))
}

func (j *journal) line(message string, kv []any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, fmt.Sprintln(append([]any{message}, kv...)...))
	for i := 0; message == "decided" && i+1 < len(kv); i += 2 {
		if kv[i] == "outcome" {
			j.decided = append(j.decided, kv[i+1].(string))
		}
	}
}

// eventsOf returns the Events of a reason.
func (j *journal) eventsOf(reason string) (found []string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range j.events {
		if strings.Contains(e, " "+reason+" on ") {
			found = append(found, e)
		}
	}
	return found
}

// linesWith returns the log's lines that contain a text.
func (j *journal) linesWith(text string) (found []string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, line := range j.lines {
		if strings.Contains(line, text) {
			found = append(found, line)
		}
	}
	return found
}

// outcomes returns those that were reported, and forgets them.
func (j *journal) outcomes() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	decided := strings.Join(j.decided, " ")
	j.decided = nil
	return decided
}

// watching says how a controller's cache of records is.
type watching int

const (
	// inSync: the cache shows each write at once.
	inSync watching = iota + 1
	// stale: the cache is in sync, and its watch hangs from the start on.
	stale
	// unwatched: records are read from the server.
	unwatched
)

func (w watching) String() string {
	return map[watching]string{inSync: "in sync", stale: "stale", unwatched: "not in sync"}[w]
}

// kit is a cluster with a policy. Tests change its fields before they start a controller.
type kit struct {
	*testing.T
	ctx      context.Context
	server   *server
	journal  *journal
	machines *machineList
	ca       *caInMemory
	tpm      *tpmStub
	policy   verifier.Policy
	config   Config
	// providerIDs are those in the requests of nodes.
	providerIDs map[string]string
}

func testPolicy() verifier.Policy {
	return verifier.Policy{
		Cluster:   testCluster,
		Providers: []verifier.Provider{{Name: "tpm", Challenges: true}, {Name: "acme"}},
		Signers: []verifier.Signer{
			{Name: tpmSigner, Providers: []string{"tpm"}}, {Name: acmeSigner, Providers: []string{"acme"}},
			{Name: kubeletSigner, Providers: []string{"tpm"}, Shared: true},
		},
		ServingSigners: []string{servingSigner, oursToServe}, SignedServingSigners: []string{oursToServe},
		ForbiddenAddresses: []string{"192.0.2.1"}, UnattestedNodes: []string{"left-alone"},
		Token: verifier.Required, Credential: verifier.Required, BootCounters: verifier.Warn,
		EKSources: []verifier.EKSource{verifier.EKInventory, verifier.EKPlatform}, NameSources: []verifier.NameSource{verifier.NameInventory},
	}
}

// inBubble runs a test with a kit.
func inBubble(t *testing.T, test func(k *kit)) {
	t.Helper()
	_, _ = nodeKey(), testCA() // made outside, as no bubble owns them
	synctest.Test(t, func(t *testing.T) { test(newKit(t)) })
}

func newKit(t *testing.T) *kit {
	t.Helper()
	k := &kit{
		T: t, server: newServer(), journal: &journal{}, machines: &machineList{tokens: map[string]verifier.Token{}}, ca: &caInMemory{},
		tpm: &tpmStub{lifetime: 5 * time.Minute}, policy: testPolicy(), providerIDs: map[string]string{},
	}
	k.ctx = log.IntoContext(t.Context(), logr.New(k.journal))
	k.config = Config{
		Providers: []evidence.Provider{k.tpm, evidence.FromSigner("acme", acmeStub{})}, Machines: k.machines, CA: k.ca, Limits: signing.DefaultLimits(), Namespace: testNamespace,
	}
	k.machine(machineNamed("worker-1", "ek-1"))
	k.machine(machineNamed("worker-2", "ek-2"))
	t.Cleanup(func() {
		for _, broken := range k.server.broken {
			t.Error(broken)
		}
	})
	return k
}

// machine adds a machine, and a bootstrap token for it: its name's last letter, six times.
func (k *kit) machine(m verifier.Machine) {
	k.machines.mu.Lock()
	defer k.machines.mu.Unlock()
	k.machines.list = append(slices.Clone(k.machines.list), m)
	k.machines.tokens[tokenFor(m.Ref.Name)] = verifier.Token{Known: true, Machine: m.Ref}
}

func tokenFor(machine string) string { return strings.Repeat(machine[len(machine)-1:], 6) }

// instance is a controller that runs.
type instance struct {
	*Controller
	*connection
	k     *kit
	cache *cachedClient
	stop  func()
}

// start starts a controller.
func (k *kit) start(w watching) *instance {
	k.Helper()
	k.ctx = log.IntoContext(k.Context(), logr.New(k.journal))
	in := &instance{connection: k.server.connect(), k: k}
	config := k.config
	config.Rules = must(verifier.New(k.policy))
	config.Requests = intake.NewRequestCache(config.Rules)
	in.cache = &cachedClient{in.connection, k.server, config.Requests, map[string]*certificatesv1.CertificateSigningRequest{}}
	c, err := New(config, Clients{Client: in.cache, Live: in.connection, Events: k.journal, Records: in.connection})
	if err != nil {
		k.Fatal(err)
	}
	in.Controller = c
	ctx, stop := context.WithCancel(context.WithoutCancel(k.Context()))
	in.stop = func() {
		synctest.Wait() // an event that arrives meanwhile would block watch.Filter for ever
		stop()
		synctest.Wait()
	}
	k.Cleanup(in.stop)
	if w == unwatched {
		return in
	}
	source, err := c.records.Watch(logr.Discard())
	if err != nil {
		k.Fatal(err)
	}
	if err := source.Start(ctx, nil); err != nil {
		k.Fatal(err)
	}
	synctest.Wait()
	if !c.records.InSync() || !c.records.KeepsUp() {
		k.Fatal("the cache of records is not in sync")
	}
	if w == stale {
		k.server.hang()
	}
	return in
}

// reconcile decides once on a request.
func (in *instance) reconcile(name string) (ctrl.Result, error) {
	synctest.Wait() // the caches are idle
	return in.Reconcile(in.k.ctx, ctrl.Request{NamespacedName: types.NamespacedName{Name: name}})
}

// once decides once on a request, without an error.
func (in *instance) once(name string) ctrl.Result {
	in.k.Helper()
	result, err := in.reconcile(name)
	if err != nil {
		in.k.Fatalf("%s: %v", name, err)
	}
	return result
}

// settle is the queue: it decides on all requests, and again on those that have changed, have
// failed, or come back. It ends when only requests are left that go on waiting.
func (in *instance) settle() {
	in.k.Helper()
	due, seen := map[string]time.Time{}, map[string]string{}
	for rounds, quiet := 0, 0; quiet < 2; rounds++ {
		if rounds > 100 {
			in.k.Fatalf("it does not come to rest: %v", in.made())
		}
		quiet++
		for _, request := range in.k.server.requests() {
			at, queued := due[request.Name]
			if seen[request.Name] == request.ResourceVersion && (!queued || time.Now().Before(at)) {
				continue
			}
			before := len(in.made())
			seen[request.Name] = request.ResourceVersion
			delete(due, request.Name)
			switch result, err := in.reconcile(request.Name); {
			case err != nil:
				due[request.Name], quiet = time.Now(), 0 // after a back-off
			case result.RequeueAfter > 0:
				due[request.Name] = time.Now().Add(result.RequeueAfter)
			}
			if slices.ContainsFunc(in.made()[before:], call.writes) {
				quiet = 0
			}
		}
		time.Sleep(retryDelay)
	}
}

// request files a request of a requester, with a document of a provider.
func (k *kit) request(name, signer, node, username string, d document) *certificatesv1.CertificateSigningRequest {
	k.Helper()
	return k.file(k.build(name, signer, node, d), username)
}

// build returns a request that is not filed yet.
func (k *kit) build(name, signer, node string, d document) *certificatesv1.CertificateSigningRequest {
	provider := "tpm"
	if signer == acmeSigner {
		provider, d.For = "acme", name
	}
	content := attestation.Request{PKCS10: pkcs10For(csr.Identity{NodeName: node, ProviderID: k.providerIDs[node]}), Provider: provider, Data: must(json.Marshal(d))}
	return csr.Object(name, signer, must(content.Marshal()), nodeKey().Public(), nil)
}

// file files a request.
func (k *kit) file(object *certificatesv1.CertificateSigningRequest, username string) *certificatesv1.CertificateSigningRequest {
	k.Helper()
	object.UID = types.UID("uid-of-" + object.Name)
	object.Labels = map[string]string{"kept": "by every write"}
	object.Spec.Username, object.Spec.Groups = username, []string{"system:bootstrappers", "system:authenticated"}
	if node, ok := strings.CutPrefix(username, "system:node:"); ok {
		object.Spec.Groups = []string{"system:nodes", "system:authenticated"}
		object.Spec.Extra = map[string]certificatesv1.ExtraValue{"authentication.kubernetes.io/credential-id": {"X509SHA256=" + node}}
	}
	if err := k.server.Create(k.ctx, object); err != nil {
		k.Fatal(err)
	}
	return object
}

func asToken(machine string) string { return "system:bootstrap:" + tokenFor(machine) }
func asNode(name string) string     { return "system:node:" + name }

// pair files a hello that was challenged, and its proof.
func (k *kit) pair(name, machine, ek, username string) (proof string) {
	k.Helper()
	k.challenged(k.request("hello-"+name, attestation.HelloSignerName, machine, username, document{EK: ek}))
	return k.request(name, tpmSigner, machine, username, document{Hello: "hello-" + name}).Name
}

// challenged has a hello be challenged.
func (k *kit) challenged(hello *certificatesv1.CertificateSigningRequest) {
	k.Helper()
	k.annotate(hello.Name, attestation.AnnotationChallenge, must(challengeUntil(time.Now().Add(k.tpm.lifetime))))
}

func (k *kit) annotate(request, key, value string) {
	k.Helper()
	object := k.get(request)
	if object.Annotations == nil {
		object.Annotations = map[string]string{}
	}
	object.Annotations[key] = value
	if err := k.server.Update(k.ctx, object); err != nil {
		k.Fatal(err)
	}
}

// serving files a request for a serving certificate.
func (k *kit) serving(name, signer, node, username string) *certificatesv1.CertificateSigningRequest {
	k.Helper()
	der := must(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject:  pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:" + node},
		DNSNames: []string{node}, IPAddresses: []net.IP{{10, 1, 2, 3}},
	}, nodeKey()))
	object := csr.Object(name, signer, pem.EncodeToMemory(&pem.Block{Type: attestation.BlockRequest, Bytes: der}), nodeKey().Public(), nil)
	object.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	return k.file(object, username)
}

// plain files a request without evidence.
func (k *kit) plain(name, signer, node, username string) *certificatesv1.CertificateSigningRequest {
	k.Helper()
	der := must(csr.PKCS10(csr.Identity{NodeName: node}, nodeKey()))
	return k.file(csr.Object(name, signer, pem.EncodeToMemory(&pem.Block{Type: attestation.BlockRequest, Bytes: der}), nodeKey().Public(), nil), username)
}

func (k *kit) get(name string) *certificatesv1.CertificateSigningRequest {
	k.Helper()
	object := &certificatesv1.CertificateSigningRequest{}
	if err := k.server.Get(k.ctx, client.ObjectKey{Name: name}, object); err != nil {
		k.Fatal(err)
	}
	return object
}

// condition has another approver, or signer, set a condition.
func (k *kit) condition(name string, kind certificatesv1.RequestConditionType, reason string) {
	k.Helper()
	object := k.get(name)
	object.Status.Conditions = append(object.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: kind, Status: corev1.ConditionTrue, Reason: reason, LastUpdateTime: metav1.Now().Rfc3339Copy(),
	})
	k.setStatus(object)
}

// issue has another signer issue a certificate for a subject.
func (k *kit) issue(name, subject string) {
	k.Helper()
	object := k.get(name)
	object.Status.Certificate = certificateFor(subject, time.Now().Add(time.Hour))
	k.setStatus(object)
}

func (k *kit) setStatus(object *certificatesv1.CertificateSigningRequest) {
	k.Helper()
	if err := k.server.Status().Update(k.ctx, object); err != nil {
		k.Fatal(err)
	}
}

// certificateFor returns a certificate for a subject in PEM.
func certificateFor(subject string, notAfter time.Time) []byte {
	template := &x509.Certificate{SerialNumber: big.NewInt(7), Subject: pkix.Name{CommonName: subject}, NotAfter: notAfter}
	der := must(x509.CreateCertificate(rand.Reader, template, template, nodeKey().Public(), nodeKey()))
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// attested writes the record of a machine that has attested: its certificate's fingerprint is the
// node's name, by which the kit's nodes ask. Without an EK it is a machine of one round.
func (k *kit) attested(machine, ek string) *v1alpha1.NodeAttestation {
	k.Helper()
	record := &v1alpha1.NodeAttestation{
		ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: machine},
		Spec: v1alpha1.NodeAttestationSpec{
			Cluster: testCluster, Provider: "tpm", NodeName: machine,
			Machine: v1alpha1.MachineReference{Source: records.SourceInventory, Name: machine, UID: types.UID("of-" + machine)},
			EK:      &v1alpha1.EndorsementKey{Fingerprint: ek, Source: string(verifier.EKInventory)},
		},
		Status: v1alpha1.NodeAttestationStatus{
			LastAttested: new(metav1.NewTime(time.Now().Add(-time.Hour))), FirstRequestUID: "first", Request: &v1alpha1.RequestReference{Name: "first", UID: "first"},
			Certificates: []v1alpha1.IssuedCertificate{{SHA256: machine, RequestUID: "first", NotAfter: metav1.NewTime(time.Now().Add(24 * time.Hour)), Noted: true}},
		},
	}
	if ek == "" {
		record.Spec.Provider, record.Spec.EK = "acme", nil
	}
	if err := k.server.Create(k.ctx, record); err != nil {
		k.Fatal(err)
	}
	return record
}

// record returns the record of a machine.
func (k *kit) record(machine string) *v1alpha1.NodeAttestation {
	k.Helper()
	record := &v1alpha1.NodeAttestation{}
	if err := k.server.Get(k.ctx, client.ObjectKey{Namespace: testNamespace, Name: machine}, record); err != nil {
		k.Fatal(err)
	}
	return record
}

// node registers a Node.
func (k *kit) node(name string) {
	k.Helper()
	if err := k.server.Create(k.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		k.Fatal(err)
	}
}

// reasonsOf returns the conditions of a request, such as "Approved/Attested Failed/Refused".
func reasonsOf(request *certificatesv1.CertificateSigningRequest) string {
	var all []string
	for _, c := range request.Status.Conditions {
		all = append(all, string(c.Type)+"/"+c.Reason)
	}
	return strings.Join(all, " ")
}

// is checks the conditions of a request, and that nothing else of it was lost.
func (k *kit) is(name, conditions string) *certificatesv1.CertificateSigningRequest {
	k.Helper()
	request := k.get(name)
	if got := reasonsOf(request); got != conditions {
		k.Errorf("%s: %q, want %q", name, got, conditions)
	}
	if request.Labels["kept"] == "" {
		k.Errorf("%s has lost its labels", name)
	}
	return request
}

// recordsNaming counts the records that name a request.
func (s *server) recordsNaming(ctx context.Context, request types.UID) (count int, err error) {
	list := &v1alpha1.NodeAttestationList{}
	err = s.List(ctx, list, client.MatchingFields{v1alpha1.FieldRequestUID: string(request)})
	return len(list.Items), err
}
