// SPDX-License-Identifier: Apache-2.0

package csr

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

const (
	// callTimeout bounds one request that is answered at once.
	callTimeout = 10 * time.Second
	// firstPause is the pause before the first list if watching does not work. It doubles with each
	// watch that fails, up to mostPause. Jitter adds up to half.
	firstPause, mostPause = 2 * time.Second, 30 * time.Second
)

// ErrNotOurs says that another request has the name of ours.
var ErrNotOurs = errors.New("an object of that name exists and holds another request")

// Client is a client for certificates.k8s.io/v1 alone. It has no clientset, which would make the
// plugin start later: each request of the kubelet waits for the plugin. Client sends each call
// once. By default, client-go repeats a call up to 10 times if the answer is 429 or 5xx with a
// Retry-After, and hides that answer.
type Client struct {
	rest rest.Interface
	// sleep waits between two tries. Tests replace it.
	sleep func(context.Context, time.Duration) error
}

// IsOverloaded reports whether the API server sheds load: 429 or 503 (RFC 6585, section 4; RFC
// 9110, section 15.6.4). retryAfter is when the server wants the call again, 0 if it does not say.
func IsOverloaded(err error) (retryAfter time.Duration, overloaded bool) {
	if !apierrors.IsTooManyRequests(err) && !apierrors.IsServiceUnavailable(err) {
		return 0, false
	}
	seconds, _ := apierrors.SuggestsClientDelay(err)
	return time.Duration(max(seconds, 0)) * time.Second, true
}

// NewClient returns a client for the cluster and the credential of config. It does not change
// config.
func NewClient(config *rest.Config) (*Client, error) {
	scheme := runtime.NewScheme()
	if err := certificatesv1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("certificates.k8s.io/v1: %w", err)
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	c := rest.CopyConfig(config)
	c.GroupVersion = &certificatesv1.SchemeGroupVersion
	c.APIPath = "/apis"
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c.ContentType = runtime.ContentTypeJSON
	c.QPS = -1 // a handful of requests in a lifetime
	// The API server chooses their number and text.
	c.WarningHandler = rest.NoWarnings{}
	transport, err := HTTPClient(c)
	if err != nil {
		return nil, err
	}
	client, err := rest.RESTClientForConfigAndClient(c, transport)
	if err != nil {
		return nil, fmt.Errorf("client for %s: %w", config.Host, err)
	}
	return &Client{rest: client, sleep: sleep}, nil
}

// maxAnswer bounds one answer, in bytes.
const maxAnswer = 8 << 20

// HTTPClient returns a client for the cluster and the credential of config. It follows no redirect,
// since client-go's transport would send the credential there. It bounds the size of an answer.
func HTTPClient(config *rest.Config) (*http.Client, error) {
	c := rest.CopyConfig(config)
	c.DisableCompression = true // a short compressed answer could become very long
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return limited{next} })
	client, err := rest.HTTPClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("client for %s: %w", config.Host, err)
	}
	bounded := *client // HTTPClientFor may return the shared default
	bounded.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &bounded, nil
}

// limited ends each answer after maxAnswer bytes with an error.
type limited struct{ next http.RoundTripper }

func (l limited) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := l.next.RoundTrip(request)
	if err == nil {
		response.Body = http.MaxBytesReader(nil, response.Body, maxAnswer)
	}
	return response, err
}

// Create files the request. With dryRun the API server validates it and keeps nothing.
func (c *Client) Create(ctx context.Context, object *certificatesv1.CertificateSigningRequest, dryRun bool) (*certificatesv1.CertificateSigningRequest, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	options := &metav1.CreateOptions{}
	if dryRun {
		options.DryRun = []string{metav1.DryRunAll}
	}
	created := &certificatesv1.CertificateSigningRequest{}
	err := c.rest.Post().MaxRetries(0).Resource("certificatesigningrequests").
		VersionedParams(options, metav1.ParameterCodec).Body(object).Do(ctx).Into(created)
	if err != nil {
		return nil, fmt.Errorf("create CertificateSigningRequest %s: %w", object.Name, err)
	}
	return created, nil
}

// Get returns the object of that name. It returns ErrNotOurs if its spec.request differs in any
// byte from the one given: every node may create requests, under any name.
func (c *Client) Get(ctx context.Context, name string, request []byte) (*certificatesv1.CertificateSigningRequest, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	object := &certificatesv1.CertificateSigningRequest{}
	if err := c.rest.Get().MaxRetries(0).Resource("certificatesigningrequests").Name(name).Do(ctx).Into(object); err != nil {
		return nil, fmt.Errorf("get CertificateSigningRequest %s: %w", name, err)
	}
	if !bytes.Equal(object.Spec.Request, request) {
		return nil, fmt.Errorf("CertificateSigningRequest %s: %w", name, ErrNotOurs)
	}
	return object, nil
}

// File creates the object, or returns the existing one. The object exists if an answer was lost, or
// a worker was killed. Usually this takes one call.
func (c *Client) File(ctx context.Context, object *certificatesv1.CertificateSigningRequest) (*certificatesv1.CertificateSigningRequest, error) {
	created, err := c.Create(ctx, object, false)
	if apierrors.IsAlreadyExists(err) {
		return c.Get(ctx, object.Name, object.Spec.Request)
	}
	return created, err
}

// Wait returns once classify (Classify or ClassifyHello) returns a decision on the object. If ctx
// ends first, Wait returns ctx's error. It watches this one object, from the given version on. If a
// watch is refused or ends early, it lists the object. Wait returns the error if the API server
// sheds load (IsOverloaded), answers 401, or refuses the list.
func (c *Client) Wait(ctx context.Context, object *certificatesv1.CertificateSigningRequest, classify func(*certificatesv1.CertificateSigningRequest) Decision) (Decision, error) {
	log, pause := klog.FromContext(ctx), firstPause
	for {
		if decision := classify(object); decision.Outcome != Pending {
			return decision, nil
		}
		began := time.Now()
		decision, err := c.watch(ctx, object, classify)
		if ctx.Err() != nil {
			return Decision{}, ctx.Err()
		}
		if err == nil && decision.Outcome != Pending {
			return decision, nil
		}
		if isFinal(err) {
			return Decision{}, err
		}
		if lasted := time.Since(began); lasted >= mostPause {
			pause = firstPause
		}
		log.V(2).Info("watch ended, listing", "request", object.Name, "pause", pause, "cause", text.Line(fmt.Sprint(err), 512))
		if err := c.sleep(ctx, pause+rand.N(pause/2)); err != nil { //nolint:gosec // G404: jitter
			return Decision{}, err
		}
		pause = min(2*pause, mostPause)
		current, err := c.list(ctx, object)
		switch {
		case ctx.Err() != nil:
			return Decision{}, ctx.Err()
		case isFinal(err), err != nil && !transient(err):
			return Decision{}, err
		case err != nil:
			log.V(2).Info("list failed", "request", object.Name, "cause", text.Line(fmt.Sprint(err), 512))
		case current == nil:
			return Decision{Outcome: Deleted}, nil
		default:
			object = current
		}
	}
}

// isFinal reports whether Wait must return this error of a watch or a list.
func isFinal(err error) bool {
	_, overloaded := IsOverloaded(err)
	return overloaded || apierrors.IsUnauthorized(err)
}

// watch watches the object until it is decided or the watch ends. If the connection is lost without
// a TCP reset, client-go's HTTP/2 health check ends the watch.
func (c *Client) watch(ctx context.Context, object *certificatesv1.CertificateSigningRequest, classify func(*certificatesv1.CertificateSigningRequest) Decision) (Decision, error) {
	options := &metav1.ListOptions{
		FieldSelector:   fields.OneTermEqualSelector("metadata.name", object.Name).String(),
		ResourceVersion: object.ResourceVersion,
		Watch:           true,
	}
	if end, ok := ctx.Deadline(); ok { // without a limit, the API server ends it after 30 to 60 min
		seconds := int64(time.Until(end)/time.Second) + 1
		options.TimeoutSeconds = &seconds
	}
	w, err := c.rest.Get().MaxRetries(0).Resource("certificatesigningrequests").VersionedParams(options, metav1.ParameterCodec).Watch(ctx)
	if err != nil {
		return Decision{}, fmt.Errorf("watch CertificateSigningRequest %s: %w", object.Name, err)
	}
	defer w.Stop()
	for event := range w.ResultChan() {
		if event.Type == watch.Error {
			return Decision{}, fmt.Errorf("watch CertificateSigningRequest %s: %w", object.Name, apierrors.FromObject(event.Object))
		}
		current, ok := event.Object.(*certificatesv1.CertificateSigningRequest)
		if !ok || current.UID != object.UID {
			continue
		}
		if decision := classify(current); decision.Outcome != Pending {
			return decision, nil
		}
		if event.Type == watch.Deleted {
			return Decision{Outcome: Deleted}, nil
		}
	}
	return Decision{Outcome: Pending}, nil
}

// list returns the object's current state. It is nil if the object is gone or another has its name.
// A credential that may not list may still be allowed to get.
func (c *Client) list(ctx context.Context, object *certificatesv1.CertificateSigningRequest) (*certificatesv1.CertificateSigningRequest, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	list := &certificatesv1.CertificateSigningRequestList{}
	err := c.rest.Get().MaxRetries(0).Resource("certificatesigningrequests").VersionedParams(&metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("metadata.name", object.Name).String(),
	}, metav1.ParameterCodec).Do(ctx).Into(list)
	if apierrors.IsForbidden(err) {
		current, err := c.Get(ctx, object.Name, object.Spec.Request)
		if apierrors.IsNotFound(err) || errors.Is(err, ErrNotOurs) || err == nil && current.UID != object.UID {
			return nil, nil
		}
		return current, err
	}
	if err != nil {
		return nil, fmt.Errorf("list CertificateSigningRequest %s: %w", object.Name, err)
	}
	for i := range list.Items {
		if list.Items[i].UID == object.UID {
			return &list.Items[i], nil
		}
	}
	return nil, nil
}

// transient reports whether another try may help: the answer is not a plain refusal.
func transient(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return true
	}
	code := status.Status().Code
	return code >= http.StatusInternalServerError || code == http.StatusGone
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
