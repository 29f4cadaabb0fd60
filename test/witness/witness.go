// SPDX-License-Identifier: Apache-2.0

// Package witness follows all CertificateSigningRequests of a control plane. Afterwards it checks
// that each proof got one certificate, and each machine one record, even if processes were killed
// meanwhile.
//
//	w, err := witness.Observe(ctx, cp)
//	defer w.Close()
//	issued, err := w.SignedOnce(ctx)
//	unpublished, err := witness.OneRecordEach(records, machines, issued)
package witness

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"sync"

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
	// certificates are all that status.certificate ever held, each once for each time that it
	// changed.
	certificates [][]byte
}

// open reports whether the controller has something to do yet.
func (s *sighting) open() bool {
	return len(s.latest.Status.Certificate) == 0 && s.refusal() == "" && (!s.hello || s.latest.Annotations[attestation.AnnotationChallenge] == "")
}

// refusal returns why a request was denied or failed, empty if it was not.
func (s *sighting) refusal() string {
	for _, c := range s.latest.Status.Conditions {
		if c.Type != certificatesv1.CertificateApproved {
			return c.Reason + ": " + c.Message
		}
	}
	return ""
}

// Witness follows all requests from its creation on. A watch shows each version of an object, so it
// misses no write.
type Witness struct {
	cp    *testbed.ControlPlane
	mark  testbed.AuditMark
	close func()

	mu      sync.Mutex
	all     map[types.UID]*sighting
	trouble error
}

// Observe begins, where there is no request yet. Close ends it.
func Observe(ctx context.Context, cp *testbed.ControlPlane) (*Witness, error) {
	w := &Witness{cp: cp, all: map[types.UID]*sighting{}}
	requests := cp.Client().CertificatesV1().CertificateSigningRequests()
	list, err := requests.List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	if len(list.Items) > 0 {
		return nil, fmt.Errorf("%d requests are left over", len(list.Items))
	}
	if w.mark, err = cp.AuditMark(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	seen, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, watcher(requests.Watch))
	if err != nil {
		cancel()
		return nil, err
	}
	var ended sync.WaitGroup
	ended.Go(func() {
		for event := range seen.ResultChan() {
			w.note(event)
		}
	})
	w.close = func() {
		cancel()
		ended.Wait()
	}
	return w, nil
}

// Close ends the watch.
func (w *Witness) Close() { w.close() }

// watcher is what a RetryWatcher starts again with.
type watcher func(context.Context, metav1.ListOptions) (watch.Interface, error)

func (w watcher) WatchWithContext(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	return w(ctx, options)
}

func (w *Witness) note(event watch.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	object, ok := event.Object.(*certificatesv1.CertificateSigningRequest)
	if !ok || event.Type == watch.Deleted {
		w.trouble = errors.Join(w.trouble, fmt.Errorf("the watch of the test itself: unexpected event %s", event.Type))
		return
	}
	s := w.all[object.UID]
	if s == nil {
		s = &sighting{name: object.Name, node: nodeOf(object), number: len(w.all), hello: object.Spec.SignerName == attestation.HelloSignerName}
		w.all[object.UID] = s
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

// Open returns how many requests the controller has something to do about.
func (w *Witness) Open() (count int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.all {
		if s.open() {
			count++
		}
	}
	return count
}

// sightings returns what was seen so far. Nobody writes any more when it is called.
func (w *Witness) sightings() ([]*sighting, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := make([]*sighting, 0, len(w.all))
	for _, s := range w.all {
		all = append(all, s)
	}
	return all, w.trouble
}

// Proofs returns how many requests were no hellos.
func (w *Witness) Proofs() (count int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.all {
		if !s.hello {
			count++
		}
	}
	return count
}
