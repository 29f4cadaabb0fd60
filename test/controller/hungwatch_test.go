// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// watchdog counts a controller's reads of records, and can make its watch of records hang.
type watchdog struct {
	mu    sync.Mutex
	lists int
	// hangs is closed when the watch continues. It is nil if the watch does not hang.
	hangs chan struct{}
}

func (w *watchdog) wrap(next http.RoundTripper) http.RoundTripper { return watchedTrip{w, next} }

type watchedTrip struct {
	*watchdog
	next http.RoundTripper
}

func (w watchedTrip) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Method != http.MethodGet || !strings.HasSuffix(request.URL.Path, "/nodeattestations") {
		return w.next.RoundTrip(request)
	}
	watch := request.URL.Query().Get("watch") != ""
	if !watch {
		w.mu.Lock()
		w.lists++
		w.mu.Unlock()
	}
	response, err := w.next.RoundTrip(request)
	if err == nil && watch {
		response.Body = &hangingBody{ReadCloser: response.Body, watchdog: w.watchdog, closed: make(chan struct{})}
	}
	return response, err
}

// hangingBody delays events while the watch hangs.
type hangingBody struct {
	io.ReadCloser
	*watchdog
	once   sync.Once
	closed chan struct{}
}

func (b *hangingBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.mu.Lock()
	hangs := b.hangs
	b.mu.Unlock()
	if hangs != nil {
		select {
		case <-hangs:
		case <-b.closed:
		}
	}
	return n, err
}

func (b *hangingBody) Close() error {
	b.once.Do(func() { close(b.closed) })
	return b.ReadCloser.Close()
}

func (w *watchdog) hang() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hangs = make(chan struct{})
}

func (w *watchdog) goOn() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.hangs)
	w.hangs = nil
}

// counted returns the number of lists of records since the last call.
func (w *watchdog) counted() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.lists
	w.lists = 0
	return n
}

// newWatchedFleet starts a controller whose watch of records the watchdog controls.
func newWatchedFleet(t *testing.T) (*fleet, *watchdog) {
	t.Helper()
	f := newFleet(t, nil)
	f.stop()
	dog := &watchdog{}
	config := f.AdminConfig()
	config.Wrap(dog.wrap)
	f.stop = f.startWith(t, config)
	return f, dog
}

// attested attests a machine under its bootstrap token. It returns a function that renews.
func (m *machine) attested(t *testing.T) *peer {
	t.Helper()
	p := m.newPeer(t, m.chip, m.asToken(m.token), m.name, m.name)
	_, proof := p.attests(t)
	return m.newPeer(t, m.chip, m.asNode(m.issued(t, proof, m.name), p.keyPEM), m.name, m.name)
}

// A decision uses the cached records, and lists none.
func TestRecordsAreNotListed(t *testing.T) {
	f, dog := newWatchedFleet(t)
	machines := []*machine{f.newMachine(t, "warms-up")}
	for i := range 3 { // on a busy machine the informer may show our own write too late
		machines = append(machines, f.newMachine(t, fmt.Sprintf("watched-%d", i)))
	}
	f.inventoried(t, machines...)
	harness.Eventually(t, harness.Soon, "it goes by the watch", func() bool {
		machines[0].attested(t)
		return dog.counted() == 0
	})
	least := [2]int{1, 1}
	for _, m := range machines[1:] {
		node := m.attested(t)
		least[0] = min(least[0], dog.counted())
		_, proof := node.attests(t)
		f.issued(t, proof, m.name)
		least[1] = min(least[1], dog.counted())
	}
	if least != [2]int{} {
		t.Errorf("records are listed by each enrolment, and by each renewal: %v", least)
	}
}

func remove(t *testing.T, f *fleet, record *v1alpha1.NodeAttestation) {
	t.Helper()
	if err := f.client.Delete(t.Context(), record); err != nil {
		t.Fatal(err)
	}
}

// While the watch hangs, a stale cache grants no certificate and refuses no proof.
func TestHungWatch(t *testing.T) {
	f, dog := newWatchedFleet(t)
	names := []string{"known", "deleted", "freed", "proven", "taken", "new"}
	machines := map[string]*machine{}
	var all []*machine
	for _, name := range names {
		machines[name] = f.newMachine(t, name)
		all = append(all, machines[name])
	}
	f.inventoried(t, all...)
	renewed := machines["known"].attested(t)
	machines["deleted"].attested(t)
	// Another machine has the name.
	other := func(name string) *v1alpha1.NodeAttestation {
		t.Helper()
		record := f.record(t, "known").DeepCopy()
		record.ObjectMeta = metav1.ObjectMeta{Namespace: f.namespace, Name: "other-" + name}
		record.Spec.Machine.Name, record.Spec.NodeName = "other-"+name, name
		record.Spec.EK = &v1alpha1.EndorsementKey{Fingerprint: strings.Repeat("0", 63) + string(name[0]%10+'0')}
		if err := f.client.Create(t.Context(), record); err != nil {
			t.Fatal(err)
		}
		return record
	}
	answered := func(name string) (*peer, *certificatesv1.CertificateSigningRequest) {
		t.Helper()
		p := f.newPeer(t, machines[name].chip, f.asToken(machines[name].token), name, name)
		hello := p.hello(t)
		harness.Eventually(t, harness.Soon, "the hello is answered", func() bool {
			hello = f.get(t, hello.Name)
			return hello.Annotations[attestation.AnnotationChallenge] != "" || reasonOf(hello) != ""
		})
		return p, hello
	}
	refused := func(name string) {
		t.Helper()
		p, request := answered(name)
		if reasonOf(request) == "" {
			request = p.file(t, p.proof(t, request))
		}
		f.refused(t, request, string(verifier.ReasonAmbiguousName))
	}
	persists := func(name string) { // a hello may be denied by what is no more; a proof is not
		t.Helper()
		var p *peer
		var hello *certificatesv1.CertificateSigningRequest
		harness.Eventually(t, 30*time.Second, name+" is challenged", func() bool {
			p, hello = answered(name)
			return reasonOf(hello) == ""
		})
		f.issued(t, p.file(t, p.proof(t, hello)), name)
	}
	proven, challenged := answered("proven")
	proof := proven.proof(t, challenged)
	freed, gone := other("freed"), other("proven")
	refused("freed")
	refused("proven")
	harness.Eventually(t, harness.Soon, "it goes by the watch", func() bool {
		dog.counted()
		_, proof := renewed.attests(t)
		f.issued(t, proof, "known")
		return dog.counted() == 0
	})

	dog.hang()
	// after this pause the cache is used again, until it misses a write of our own
	keepsUpAgain := func() { time.Sleep(11 * time.Second) }
	t.Run("another's record was deleted since the hello", func(t *testing.T) {
		remove(t, f, gone)
		f.issued(t, proven.file(t, proof), "proven")
	})
	keepsUpAgain()
	t.Run("another's record was made", func(t *testing.T) {
		taken := other("taken")
		refused("taken")
		refused("taken")
		remove(t, f, taken)
		persists("taken")
	})
	keepsUpAgain()
	t.Run("its record was deleted", func(t *testing.T) {
		record := f.record(t, "deleted")
		remove(t, f, record)
		persists("deleted")
		if got := f.record(t, "deleted"); got.UID == record.UID || len(got.Status.Certificates) != 1 {
			t.Errorf("%+v", got)
		}
	})
	t.Run("renewed", func(t *testing.T) {
		for range 3 {
			_, proof := renewed.attests(t)
			f.issued(t, proof, "known")
		}
	})
	t.Run("its record was made", func(t *testing.T) {
		persists("new")
		record := f.record(t, "new")
		remove(t, f, record)
		record.ResourceVersion, record.UID = "", ""
		if err := f.client.Create(t.Context(), record); err != nil {
			t.Fatal(err)
		}
		persists("new")
	})
	remove(t, f, freed)
	dog.goOn()
	for name := range machines {
		persists(name)
	}
	if n := f.records(t); n != len(machines) {
		t.Errorf("%d records of %d machines", n, len(machines))
	}
}
