// SPDX-License-Identifier: Apache-2.0

package intake

import (
	"context"
	"encoding/json"
	"errors"
	"runtime"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/pager"
	"sigs.k8s.io/controller-runtime/pkg/cache"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// RequestCache bounds the memory of a cache of CertificateSigningRequests. Requesters control the
// number and the size of requests. The cache keeps only the fields that decisions read. Of a
// pending request beyond the budget it keeps only the identity and the claim. The Controller reads
// such a request live before it decides. The same UID means the same spec, since the spec is
// immutable.
//
// Code that writes a request from such a cache must patch: an update would remove the missing
// fields.
type RequestCache struct {
	rules  *verifier.Rules
	Budget *fairqueue.Budget
	// Providers are the Controller's providers. It is nil until New sets it.
	Providers map[string]evidence.Provider
}

// NewRequestCache returns a RequestCache for one cache. Pass it to that cache by Configure, and to
// a Controller by Config.Requests. Make the Controller before the cache starts.
func NewRequestCache(rules *verifier.Rules) *RequestCache {
	return &RequestCache{rules: rules, Budget: fairqueue.NewBudget()}
}

// Configure applies the bounds to the options of a cache.
func (r *RequestCache) Configure(options *cache.Options) {
	options.NewInformer = func(lw toolscache.ListerWatcher, object apiruntime.Object, resync time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
		if _, ok := object.(*certificatesv1.CertificateSigningRequest); ok {
			lw = r.reducing(lw)
		}
		return toolscache.NewSharedIndexInformer(lw, object, resync, indexers)
	}
}

// listPage is the number of requests in one page. A request may have 1.5 MB, and twice that
// decoded.
const listPage = 5

// reducing reduces each request when it arrives. It lists in small pages, since one list would hold
// all requests in memory at once. client-go lists after errors, and if the API server cannot stream
// the initial state (before Kubernetes 1.34).
func (r *RequestCache) reducing(lw toolscache.ListerWatcher) toolscache.ListerWatcher {
	whole := toolscache.ToListerWatcherWithContext(lw)
	return &toolscache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			events, err := whole.WatchWithContext(ctx, options)
			if err != nil {
				return nil, err
			}
			return watch.Filter(events, func(e watch.Event) (watch.Event, bool) {
				if request, ok := e.Object.(*certificatesv1.CertificateSigningRequest); ok && e.Type != watch.Bookmark {
					e.Object = r.Reduce(request)
				}
				return e, true
			}), nil
		},
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (apiruntime.Object, error) {
			// With a version the API server answers from its watch cache, which has no pages.
			options.ResourceVersion, options.ResourceVersionMatch = "", ""
			options.Limit, options.Continue = listPage, ""
			pages := &pager.ListPager{PageFn: func(ctx context.Context, options metav1.ListOptions) (apiruntime.Object, error) {
				page, err := whole.ListWithContext(ctx, options)
				if err != nil {
					return nil, err
				}
				list, ok := page.(*certificatesv1.CertificateSigningRequestList)
				if !ok {
					return nil, errors.New("the API server answered with another kind of list")
				}
				reduced := &metainternal.List{ListMeta: list.ListMeta}
				for i := range list.Items {
					reduced.Items = append(reduced.Items, r.Reduce(&list.Items[i]))
				}
				return reduced, nil
			}}
			all, _, err := pages.List(ctx, options)
			return all, err
		},
	}
}

// Reduce returns the part of a request that the cache keeps.
func (r *RequestCache) Reduce(request *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	refused := csrstate.Of(request).Finished() && len(request.Status.Certificate) == 0
	if refused || !r.rules.Matches(request) {
		return trimmed(request)
	}
	kept := &certificatesv1.CertificateSigningRequest{TypeMeta: request.TypeMeta, ObjectMeta: identity(request), Spec: request.Spec, Status: request.Status}
	if challenge := request.Annotations[attestation.AnnotationChallenge]; challenge != "" && len(challenge) <= attestation.MaxChallenge {
		kept.Annotations = map[string]string{attestation.AnnotationChallenge: challenge}
	}
	// keep one byte more than allowed, so that the rules refuse the request as too long
	if len(kept.Spec.Request) > attestation.MaxRequestSize {
		kept.Spec.Request = append([]byte(nil), kept.Spec.Request[:attestation.MaxRequestSize+1]...)
	}
	// only approvers can change the state, so the budget need not count it
	if csrstate.Of(kept) != csrstate.Pending {
		return kept
	}
	found := summarize(r.rules, r.Providers, kept, request.Annotations[attestation.AnnotationOrigin])
	found.Judged = isJudged(request)
	// An answered rehearsal exists for a day, so the cache drops its content.
	answered := found.Judged || attestation.IsRehearsalSigner(request.Spec.SignerName) && found.Expires != 0
	if !answered && r.reserve(kept) {
		setSummary(kept, found)
		return kept
	}
	found.Dropped = true
	dropped := &certificatesv1.CertificateSigningRequest{
		TypeMeta: request.TypeMeta, ObjectMeta: identity(request),
		Spec: certificatesv1.CertificateSigningRequestSpec{SignerName: request.Spec.SignerName, Username: request.Spec.Username},
	}
	setSummary(dropped, found)
	return dropped
}

// reserve reports whether the budget has room for a request, and reserves it. The reservation ends
// when the garbage collector frees the object. So the budget counts all objects in memory,
// also those that only a worker still refers to.
func (r *RequestCache) reserve(kept *certificatesv1.CertificateSigningRequest) bool {
	requester, size := kept.Spec.Username, kept.Size()
	if !r.Budget.Reserve(requester, size) {
		return false
	}
	runtime.AddCleanup(kept, func(size int) { r.Budget.Release(requester, size) }, size)
	return true
}

// setSummary puts the summary into the cached copy of a request.
func setSummary(kept *certificatesv1.CertificateSigningRequest, found summary) {
	value, err := json.Marshal(found)
	if err != nil { // not reached: strings and numbers always marshal
		return
	}
	if kept.Annotations == nil {
		kept.Annotations = map[string]string{}
	}
	kept.Annotations[annotationSummary] = string(value)
}

// identity is the metadata that distinguishes a version of a request from all others, and its age.
func identity(request *certificatesv1.CertificateSigningRequest) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: request.Name, UID: request.UID, ResourceVersion: request.ResourceVersion, CreationTimestamp: request.CreationTimestamp,
	}
}

// trimmed returns a request's identity, its signer, and the types of its conditions. Dropping the
// username means that no unattested-node rule can match it.
func trimmed(request *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	kept := &certificatesv1.CertificateSigningRequest{
		TypeMeta: request.TypeMeta, ObjectMeta: identity(request), Spec: certificatesv1.CertificateSigningRequestSpec{SignerName: request.Spec.SignerName},
	}
	for _, c := range request.Status.Conditions {
		kept.Status.Conditions = append(kept.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: c.Type, Status: c.Status})
	}
	keepIssued(kept, request)
	return kept
}

// CachedIssued is an annotation that exists only in the cache, on a trimmed request. It says that a
// node or a bootstrap identity got a certificate for the request.
const CachedIssued = "attestation.cluster.x-k8s.io/cached-issued"

// AnnotationIssuedWithoutAttestation marks a request that was reported as issued without
// attestation. Its value is the fingerprint of the certificate. It keeps other replicas from
// reporting the request again.
const AnnotationIssuedWithoutAttestation = "attestation.cluster.x-k8s.io/issued-without-attestation"

// groupsOfNodes are the groups whose members request certificates of nodes.
var groupsOfNodes = []string{"system:bootstrappers", "system:nodes"}

// IssuedToNode reports whether a node or a bootstrap identity got a certificate for its request.
// Serving certificates of the built-in signer do not count: they authenticate no request to the API
// server.
func IssuedToNode(request *certificatesv1.CertificateSigningRequest) bool {
	return len(request.Status.Certificate) > 0 && request.Spec.SignerName != certificatesv1.KubeletServingSignerName &&
		!isMarked(request) &&
		slices.ContainsFunc(request.Spec.Groups, func(group string) bool { return slices.Contains(groupsOfNodes, group) })
}

// isMarked reports whether the annotation has the fingerprint of the request's certificate. The
// requester may have set any other value.
func isMarked(request *certificatesv1.CertificateSigningRequest) bool {
	value := request.Annotations[AnnotationIssuedWithoutAttestation]
	if value == "" {
		return false
	}
	fingerprint, err := signing.Fingerprint(request.Status.Certificate)
	return err == nil && value == "sha256:"+fingerprint
}

// keepIssued marks a trimmed request that has a certificate. watch.Issued reads the certificate and
// the requester live.
func keepIssued(kept, request *certificatesv1.CertificateSigningRequest) {
	if IssuedToNode(request) {
		kept.Annotations = map[string]string{CachedIssued: ""}
	}
}
