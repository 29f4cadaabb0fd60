// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	certificatesclient "k8s.io/client-go/kubernetes/typed/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const (
	noAudit = "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: None}]\n"
	// pageSize is how many requests are listed at a time.
	pageSize = 500
	// keptProofs is how many proofs impostors have to choose from.
	keptProofs = 16
	// cleaners is how many requests are deleted at a time, and caughtUp how long a request may be
	// due for that if they have caught up.
	cleaners, caughtUp = 2, 5 * time.Second
)

// author is who files a request.
type author int

const (
	honest author = iota + 1
	impostor
	flooder
)

// filing is who filed a request, and which node name that machine may have.
type filing struct {
	by   author
	name string
}

// verdict is what is known of one request.
type verdict struct {
	filing
	// certificate is the SHA-256 of the one that was issued.
	certificate [sha256.Size]byte
	refused     string
	ended       bool
	// exists says that the API server had it, and that it was not deleted since.
	exists bool
}

// oracle sees each version of each request, and knows who filed it. So it can check each decision.
type oracle struct {
	c   *campaign
	api certificatesclient.CertificateSigningRequestInterface
	// report is called for each wrong decision.
	report func(format string, args ...any)
	mu     sync.Mutex
	all    map[string]*verdict
	next   chan struct{} // closed to have all requests listed again
	// restored says that a request may be issued twice: etcd was restored in between.
	restored bool
	issued   int
	wrong    int
	reasons  map[author]map[string]int
	proofs   []*certificatesv1.CertificateSigningRequest
	ended    []ended
	// leftOfFlood is how many requests of the flood still exist: see deleteFlood.
	leftOfFlood int
}

// ended is a request that is deleted at a time.
type ended struct {
	name string
	at   time.Time
}

// compare orders by the time of the deletion.
func (e ended) compare(other ended) int { return e.at.Compare(other.at) }

func newOracle(c *campaign) *oracle {
	config := c.AdminConfig()
	config.ContentType, config.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf"
	api, err := kubernetes.NewForConfig(config)
	if err != nil {
		c.t.Fatal(err)
	}
	return &oracle{
		c: c, report: c.t.Errorf, api: api.CertificatesV1().CertificateSigningRequests(), all: map[string]*verdict{}, next: make(chan struct{}),
		reasons: map[author]map[string]int{honest: {}, impostor: {}, flooder: {}},
	}
}

// filed says who files a request, before it is filed.
func (o *oracle) filed(name string, by filing) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all[name] = &verdict{filing: by}
}

// wrap notes whose requests a client files.
func (o *oracle) wrap(by filing) func(http.RoundTripper) http.RoundTripper {
	return func(next http.RoundTripper) http.RoundTripper {
		return roundTrip(func(request *http.Request) (*http.Response, error) {
			if request.Method != http.MethodPost || request.Body == nil {
				return next.RoundTrip(request)
			}
			content, err := io.ReadAll(request.Body)
			if err != nil {
				return nil, err
			}
			_ = request.Body.Close()
			object := struct {
				Metadata struct {
					Name string `json:"name"`
				} `json:"metadata"`
			}{}
			if err := json.Unmarshal(content, &object); err != nil {
				return nil, err
			}
			o.filed(object.Metadata.Name, by)
			request.Body = io.NopCloser(bytes.NewReader(content))
			return next.RoundTrip(request)
		})
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

// expectRestore prepares the oracle for a restore of etcd. From now on a request may be
// issued a second time, and a request may be denied because its record is older than it.
func (o *oracle) expectRestore() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.restored = true
}

// restart makes the oracle list all requests again: after a restore its watch waits for versions
// that are still to come.
func (o *oracle) restart() {
	o.mu.Lock()
	defer o.mu.Unlock()
	close(o.next)
	o.next = make(chan struct{})
}

// follow lists and watches all requests until ctx ends.
func (o *oracle) follow(ctx context.Context) {
	for ctx.Err() == nil {
		o.mu.Lock()
		next := o.next
		o.mu.Unlock()
		within, cancel := context.WithCancel(ctx)
		go func() {
			select {
			case <-next:
			case <-within.Done():
			}
			cancel()
		}()
		_ = o.look(within) // what was missed is in the next list
		cancel()
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond): // the API server may be away
		}
	}
}

// look lists, and watches until that breaks off.
func (o *oracle) look(ctx context.Context) error {
	version, err := o.list(ctx)
	if err != nil {
		return err
	}
	for {
		w, err := o.api.Watch(ctx, metav1.ListOptions{ResourceVersion: version, AllowWatchBookmarks: true})
		if err != nil {
			return err
		}
		events := 0
		for event := range w.ResultChan() {
			object, ok := event.Object.(*certificatesv1.CertificateSigningRequest)
			if !ok {
				w.Stop()
				return fmt.Errorf("event %s", event.Type)
			}
			events++
			version = object.ResourceVersion
			if event.Type == watch.Added || event.Type == watch.Modified {
				o.see(object)
			}
		}
		if events == 0 {
			return ctx.Err()
		}
	}
}

func (o *oracle) list(ctx context.Context) (version string, err error) {
	options := metav1.ListOptions{Limit: pageSize}
	for {
		page, err := o.api.List(ctx, options)
		if err != nil {
			return "", err
		}
		for i := range page.Items {
			o.see(&page.Items[i])
		}
		if options.Continue = page.Continue; options.Continue == "" {
			return page.ResourceVersion, nil
		}
	}
}

// see checks one version of a request.
func (o *oracle) see(object *certificatesv1.CertificateSigningRequest) {
	o.mu.Lock()
	defer o.mu.Unlock()
	v := o.all[object.Name]
	if v == nil { // such as one that tries the policies
		v = &verdict{}
		o.all[object.Name] = v
	}
	v.exists = true
	if len(object.Status.Certificate) > 0 {
		o.seeCertificate(v, object)
	}
	refusal := ""
	for _, condition := range object.Status.Conditions {
		if condition.Type != certificatesv1.CertificateApproved {
			refusal = condition.Reason
		}
	}
	if refusal != "" && v.refused != refusal {
		v.refused = refusal
		if v.by != 0 {
			o.reasons[v.by][refusal]++
		}
		if v.by == honest && !o.allowed(refusal) {
			o.fault("%s of %s was refused: %+v", object.Name, v.name, object.Status.Conditions)
		}
	}
	if (refusal != "" || len(object.Status.Certificate) > 0) && !v.ended {
		v.ended = true
		o.ended = append(o.ended, ended{object.Name, time.Now().Add(o.c.size.kept)})
	}
}

// allowed reports whether an honest machine's request may be refused for a reason. A hello ends so,
// with its proof or its time. After a restore, docs/operations.md says which others there are.
func (o *oracle) allowed(reason string) bool {
	switch verifier.Reason(reason) {
	case attestation.ReasonCompleted, attestation.ReasonExpired, verifier.ReasonHelloExpired:
		return true
	case verifier.ReasonUnknownCredential, "AttestationChallengeKeyUnknown",
		// the record was deleted while the machine asked with its bootstrap credential
		verifier.ReasonNodeAlreadyRegistered,
		// the record was deleted after the approval, which is valid only together with it
		verifier.ReasonApprovedWithoutAttestation:
		return o.restored
	}
	return false
}

// seeCertificate checks that a certificate is for the machine that asked, and its key.
func (o *oracle) seeCertificate(v *verdict, object *certificatesv1.CertificateSigningRequest) {
	sum := sha256.Sum256(object.Status.Certificate)
	if v.certificate == sum {
		return
	}
	if v.certificate != ([sha256.Size]byte{}) && !o.restored {
		o.fault("%s of %s has a second certificate", object.Name, v.name)
	}
	v.certificate = sum
	o.issued++
	_, leaf, err := csr.ParseCertificates(object.Status.Certificate)
	if err != nil {
		o.fault("%s: %v", object.Name, err)
		return
	}
	if v.by != honest || leaf.Subject.CommonName != "system:node:"+v.name || !slices.Equal(leaf.Subject.Organization, []string{"system:nodes"}) || !isFor(leaf, object) {
		o.fault("%s, which author %d with the name %q filed, has a certificate for %s", object.Name, v.by, v.name, leaf.Subject)
	}
	if o.proofs = append(o.proofs, object); len(o.proofs) > keptProofs {
		o.proofs = o.proofs[1:]
	}
}

func isFor(leaf *x509.Certificate, object *certificatesv1.CertificateSigningRequest) bool {
	block, _ := pem.Decode(object.Spec.Request)
	if block == nil {
		return false
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return false
	}
	key, ok := request.PublicKey.(*ecdsa.PublicKey)
	return ok && key.Equal(leaf.PublicKey)
}

// fault is a wrong decision.
func (o *oracle) fault(format string, args ...any) {
	o.wrong++
	if o.wrong <= 20 {
		o.report("WRONG DECISION: "+format, args...)
	}
}

// clean deletes what has ended, as kube-controller-manager does.
func (o *oracle) clean(ctx context.Context) {
	work := make(chan string)
	var wait sync.WaitGroup
	for range cleaners {
		wait.Go(func() {
			for name := range work {
				if err := o.api.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && ctx.Err() == nil && !strings.Contains(err.Error(), "not found") {
					o.later(name)
					continue
				}
				o.deleted(name)
			}
		})
	}
	defer wait.Wait()
	defer close(work)
	for {
		name := o.due()
		if name == "" {
			select {
			case <-ctx.Done():
				return
			case <-time.After(100 * time.Millisecond): // nothing is due
			}
			continue
		}
		select {
		case work <- name:
		case <-ctx.Done():
			return
		}
	}
}

func (o *oracle) due() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.ended) == 0 || time.Now().Before(o.ended[0].at) {
		return ""
	}
	name := o.ended[0].name
	o.ended = o.ended[1:]
	if v := o.all[name]; v != nil {
		v.ended = false // where it comes back from a backup
	}
	return name
}

// deleteFlood has the cleaners delete the requests of a flood, as an operator does, and returns how
// many there are. The controller would deny them at their deadlines.
func (o *oracle) deleteFlood() (count int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	for i := range o.ended {
		if o.all[o.ended[i].name].by == flooder {
			o.ended[i].at = now
		}
	}
	for name, v := range o.all {
		if v.by != flooder || !v.exists {
			continue
		}
		if count++; !v.ended {
			v.ended = true
			o.ended = append(o.ended, ended{name, now})
		}
	}
	slices.SortStableFunc(o.ended, ended.compare)
	o.leftOfFlood = count
	return count
}

// floodIsDeleted reports whether no request of the flood exists, and the cleaners have caught up.
func (o *oracle) floodIsDeleted() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.leftOfFlood <= 0 && (len(o.ended) == 0 || time.Since(o.ended[0].at) < caughtUp)
}

// deleted notes that a request is gone.
func (o *oracle) deleted(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	v := o.all[name]
	if v == nil || !v.exists {
		return
	}
	v.exists = false
	if v.by == flooder {
		o.leftOfFlood--
	}
}

// later tries again to delete a request.
func (o *oracle) later(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	again := ended{name, time.Now().Add(time.Second)}
	at, _ := slices.BinarySearchFunc(o.ended, again, ended.compare)
	o.ended = slices.Insert(o.ended, at, again)
}

// proof returns one of the latest that got a certificate, and nil if there is none yet.
func (o *oracle) proof(n int) *certificatesv1.CertificateSigningRequest {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.proofs) == 0 {
		return nil
	}
	return o.proofs[n%len(o.proofs)]
}

// settle waits until the oracle has seen all requests.
func (o *oracle) settle() {
	if _, err := o.list(o.c.ctx); err != nil {
		o.c.t.Error(err)
	}
}

func (o *oracle) failed() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.wrong > 0
}

func (o *oracle) issuedCount() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.issued
}

// refusedForgeries returns how many requests of impostors were refused.
func (o *oracle) refusedForgeries() (count int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, n := range o.reasons[impostor] {
		count += n
	}
	return count
}

// summary says how requests of an author ended that got no certificate.
func (o *oracle) summary(by author) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var parts []string
	for _, reason := range slices.Sorted(maps.Keys(o.reasons[by])) {
		parts = append(parts, fmt.Sprintf("%s %d", reason, o.reasons[by][reason]))
	}
	filed := 0
	for _, v := range o.all {
		if v.by == by {
			filed++
		}
	}
	return fmt.Sprintf("%d requests; %s", filed, strings.Join(parts, ", "))
}

func (o *oracle) wrongCount() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.wrong
}
