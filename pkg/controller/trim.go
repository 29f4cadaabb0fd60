// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/pager"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// TrimCache has a cache keep of CertificateSigningRequests only what decisions read, and never hold
// many whole requests at a time: whoever may file requests decides how many there are, and how
// large.
func TrimCache(options *cache.Options, rules *verifier.Rules) {
	trim := TrimRequests(rules)
	if options.ByObject == nil {
		options.ByObject = map[client.Object]cache.ByObject{}
	}
	options.ByObject[&certificatesv1.CertificateSigningRequest{}] = cache.ByObject{Transform: trim}
	options.NewInformer = func(lw toolscache.ListerWatcher, object runtime.Object, resync time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
		if _, ok := object.(*certificatesv1.CertificateSigningRequest); ok {
			lw = pagedList(lw, trim)
		}
		return toolscache.NewSharedIndexInformer(lw, object, resync, indexers)
	}
}

// listPage is how many requests one answer has. Each may have 1.5 MB, and twice that decoded.
const listPage = 5

// pagedList lists in small pages and trims each one. client-go's informers stream their first state
// and trim each object of it. But they list where the API server does not stream (before Kubernetes
// 1.34), and after errors; then the answer has all requests, and is trimmed only once it is
// decoded.
func pagedList(lw toolscache.ListerWatcher, trim toolscache.TransformFunc) toolscache.ListerWatcher {
	whole := toolscache.ToListerWatcherWithContext(lw)
	return &toolscache.ListWatch{
		WatchFuncWithContext: whole.WatchWithContext,
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			// With a version the API server answers from its watch cache, which has no pages.
			options.ResourceVersion, options.ResourceVersionMatch = "", ""
			options.Limit, options.Continue = listPage, ""
			pages := &pager.ListPager{PageFn: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
				page, err := whole.ListWithContext(ctx, options)
				list, ok := page.(*certificatesv1.CertificateSigningRequestList)
				if err != nil || !ok {
					return page, err
				}
				for i := range list.Items {
					trimmed, err := trim(&list.Items[i])
					if err != nil {
						return nil, err
					}
					list.Items[i] = *trimmed.(*certificatesv1.CertificateSigningRequest)
				}
				return list, nil
			}}
			all, _, err := pages.ListWithAlloc(ctx, options)
			return all, err
		},
	}
}

// TrimRequests is a transform for a cache of CertificateSigningRequests; see TrimCache. A request
// of ours keeps spec and status, since decisions read them. A longer one keeps as much as shows
// that it is too long. What writes a trimmed request must be a patch: an update would remove what
// is missing.
func TrimRequests(rules *verifier.Rules) toolscache.TransformFunc {
	return func(object any) (any, error) {
		request, ok := object.(*certificatesv1.CertificateSigningRequest)
		if !ok {
			return object, nil
		}
		refused := stateOf(request) == done && len(request.Status.Certificate) == 0
		if refused || !rules.Matches(request) {
			return trimmed(request), nil
		}
		kept := &certificatesv1.CertificateSigningRequest{TypeMeta: request.TypeMeta, ObjectMeta: identity(request), Spec: request.Spec, Status: request.Status}
		if challenge := request.Annotations[attestation.AnnotationChallenge]; challenge != "" && len(challenge) <= attestation.MaxChallenge {
			kept.Annotations = map[string]string{attestation.AnnotationChallenge: challenge}
		}
		if len(kept.Spec.Request) > attestation.MaxRequestSize {
			kept.Spec.Request = append([]byte(nil), kept.Spec.Request[:attestation.MaxRequestSize+1]...)
		}
		return kept, nil
	}
}

// identity is the metadata that tells a version of a request from all others, and its age.
func identity(request *certificatesv1.CertificateSigningRequest) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: request.Name, UID: request.UID, ResourceVersion: request.ResourceVersion, CreationTimestamp: request.CreationTimestamp,
	}
}

// trimmed keeps of a request its identity, its signer, and the types of its conditions. Dropping
// the username means that no unattested-node rule can match it.
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
