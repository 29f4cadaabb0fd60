// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// sighting is all that was ever seen of one request.
type sighting struct {
	name, node string
	// number counts the requests as they were first seen.
	number int
	hello  bool
	latest *certificatesv1.CertificateSigningRequest
	// certificates are all that status.certificate ever held, each once for each time that it changed.
	certificates [][]byte
}

// open reports whether the controller has something to do yet.
func (s *sighting) open() bool {
	return len(s.latest.Status.Certificate) == 0 && refusal(s.latest) == "" && (!s.hello || s.latest.Annotations[attestation.AnnotationChallenge] == "")
}

// refusal returns why a request was denied or failed, empty if it was not.
func refusal(object *certificatesv1.CertificateSigningRequest) string {
	for _, c := range object.Status.Conditions {
		if c.Type != certificatesv1.CertificateApproved {
			return c.Reason + ": " + c.Message
		}
	}
	return ""
}

// observer follows all requests from when it was made: a watch shows each version of an object, so nothing that was written for a moment is missed.
type observer struct {
	mu      sync.Mutex
	all     map[types.UID]*sighting
	trouble string
	mark    testbed.AuditMark
}

func observe(t *testing.T) *observer {
	t.Helper()
	o := &observer{all: map[types.UID]*sighting{}}
	requests := shared.Client().CertificatesV1().CertificateSigningRequests()
	list, err := requests.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Items) > 0 {
		t.Fatalf("%d requests are left over", len(list.Items))
	}
	if o.mark, err = shared.AuditMark(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	w, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, watcher(requests.Watch))
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	var ended sync.WaitGroup
	ended.Go(func() {
		for event := range w.ResultChan() {
			o.note(event)
		}
	})
	t.Cleanup(func() {
		cancel()
		ended.Wait()
	})
	return o
}

// watcher is what a RetryWatcher begins anew with.
type watcher func(context.Context, metav1.ListOptions) (watch.Interface, error)

func (w watcher) WatchWithContext(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	return w(ctx, options)
}

func (o *observer) note(event watch.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	object, ok := event.Object.(*certificatesv1.CertificateSigningRequest)
	if !ok || event.Type == watch.Deleted {
		o.trouble = "the watch of the test itself: unexpected event " + string(event.Type)
		return
	}
	s := o.all[object.UID]
	if s == nil {
		s = &sighting{name: object.Name, node: nodeOf(object), number: len(o.all), hello: object.Spec.SignerName == attestation.HelloSignerName}
		o.all[object.UID] = s
	}
	s.latest = object
	var last []byte
	if n := len(s.certificates); n > 0 {
		last = s.certificates[n-1]
	}
	if !bytes.Equal(last, object.Status.Certificate) {
		s.certificates = append(s.certificates, object.Status.Certificate)
	}
}

func nodeOf(object *certificatesv1.CertificateSigningRequest) string {
	block, _ := pem.Decode(object.Spec.Request)
	if block == nil {
		return ""
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return ""
	}
	return strings.TrimPrefix(request.Subject.CommonName, "system:node:")
}

// open returns how many requests the controller has something to do about.
func (o *observer) open() (count int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range o.all {
		if s.open() {
			count++
		}
	}
	return count
}

// sightings returns what was seen so far. Nobody writes any more when it is called.
func (o *observer) sightings(t *testing.T) []*sighting {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.trouble != "" {
		t.Fatal(o.trouble)
	}
	all := make([]*sighting, 0, len(o.all))
	for _, s := range o.all {
		all = append(all, s)
	}
	return all
}

// eachSignedOnce checks that every proof got one certificate, which never changed, that no other request got one, and that no request of
// an honest machine was refused. It returns the certificates by node name, and takes the watch's word and the audit log's.
func (o *observer) eachSignedOnce(t *testing.T) map[string][][]byte {
	t.Helper()
	// A watch comes behind: the last write that anybody knows of has to be in it.
	eventually(t, 10*time.Second, "nothing is open", func() bool { return o.open() == 0 })
	written := o.statusWrites(t)
	issued := map[string][][]byte{}
	for _, s := range o.sightings(t) {
		want := 1
		if s.hello {
			want = 0
		}
		if why := refusal(s.latest); !s.hello && why != "" {
			t.Errorf("%s of %s was refused: %s", s.name, s.node, why)
		}
		if len(s.certificates) != want || written[s.name] > want {
			t.Errorf("%s of %s (hello %t): its certificate changed %d times, and was written %d times, not %d",
				s.name, s.node, s.hello, len(s.certificates), written[s.name], want)
		}
		issued[s.node] = append(issued[s.node], s.certificates...)
	}
	return issued
}

// statusWrites returns how often the API server let a certificate be written, by name of the request. A write whose caller was killed before it had the
// answer may be missing: the audit log has it as failed.
func (o *observer) statusWrites(t *testing.T) map[string]int {
	t.Helper()
	events, err := shared.AuditSince(o.mark)
	if err != nil {
		t.Fatal(err)
	}
	writes := map[string]int{}
	for _, e := range events {
		done := e.Stage == testbed.StageResponseComplete && e.Code < http.StatusMultipleChoices
		if done && e.Resource == "certificatesigningrequests" && e.Subresource == "status" && e.Verb != "get" {
			writes[e.Name]++
		}
	}
	return writes
}

// hellosAreSettled checks that no hello is left open but with a challenge that may still be answered, and that each machine's last one, which led
// to its certificate, is closed. One before that may be open, where the controller was killed before it had closed it, and the machine came with
// another proof before it was back: its record does not know the first one any more.
func (o *observer) hellosAreSettled(t *testing.T) {
	t.Helper()
	eventually(t, 10*time.Second, "what led to a certificate is closed", func() bool {
		return !slices.ContainsFunc(o.lastHellos(t), func(s *sighting) bool { return refusal(s.latest) == "" })
	})
	closed, waiting := 0, 0
	for _, s := range o.sightings(t) {
		if !s.hello {
			continue
		}
		if refusal(s.latest) != "" {
			closed++
			continue
		}
		challenge, err := attestation.ParseChallenge([]byte(s.latest.Annotations[attestation.AnnotationChallenge]))
		if err != nil || time.Unix(challenge.Expires, 0).Before(time.Now()) {
			t.Errorf("hello %s of %s is open: %v", s.name, s.node, err)
		}
		waiting++
	}
	t.Logf("%d hellos are closed, %d wait for the end of their challenge", closed, waiting)
}

// lastHellos returns the hello that each machine's last proof refers to.
func (o *observer) lastHellos(t *testing.T) (hellos []*sighting) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	last := map[string]*sighting{}
	for _, s := range o.all {
		if !s.hello && (last[s.node] == nil || last[s.node].number < s.number) {
			last[s.node] = s
		}
	}
	for _, s := range last {
		content, err := attestation.Parse(s.latest.Spec.Request)
		if err != nil {
			t.Fatal(err)
		}
		proof, err := attestation.ParseProof(content.Data)
		if err != nil {
			t.Fatal(err)
		}
		hello := o.all[types.UID(proof.HelloUID)]
		if hello == nil {
			t.Fatalf("proof %s of %s refers to no hello", s.name, s.node)
		}
		hellos = append(hellos, hello)
	}
	return hellos
}
