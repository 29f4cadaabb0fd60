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

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// watchdog counts how a controller reads records, and has its watch of them hang.
type watchdog struct {
	mu sync.Mutex
	// lists and watches count the calls.
	lists, watches int
	// hangs is closed when the watch goes on; nil if it does not hang.
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
	w.mu.Lock()
	if watch {
		w.watches++
	} else {
		w.lists++
	}
	w.mu.Unlock()
	response, err := w.next.RoundTrip(request)
	if err == nil && watch {
		response.Body = &hangingBody{ReadCloser: response.Body, watchdog: w.watchdog, closed: make(chan struct{})}
	}
	return response, err
}

// hangingBody withholds what comes while the watch hangs.
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

// counted returns how often records were listed since it was last asked.
func (w *watchdog) counted() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.lists
	w.lists = 0
	return n
}

// newWatchedFleet starts a controller whose watch of records is the watchdog's.
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

// attested has a machine attest under its bootstrap token, and returns how to renew.
func (m *machine) attested(t *testing.T) *peer {
	t.Helper()
	p := m.newPeer(t, m.chip, m.asToken(m.token), m.name, m.name)
	_, proof := p.attests(t)
	return m.newPeer(t, m.chip, m.asNode(m.issued(t, proof, m.name), p.keyPEM), m.name, m.name)
}

// A decision goes by what a watch tells, and lists no records.
func TestRecordsAreNotListed(t *testing.T) {
	f, dog := newWatchedFleet(t)
	machines := []*machine{f.newMachine(t, "warms-up")}
	for i := range 3 { // on a busy machine an own write may be told too late
		machines = append(machines, f.newMachine(t, fmt.Sprintf("watched-%d", i)))
	}
	f.inventoried(t, machines...)
	eventually(t, 20*time.Second, "it goes by the watch", func() bool {
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

// What the watch does not tell harms nobody: no certificate is granted by it, and none refused.
func TestHungWatch(t *testing.T) {
	f, dog := newWatchedFleet(t)
	names := []string{"known", "deleted", "freed", "taken", "new"}
	machines := map[string]*machine{}
	var all []*machine
	for _, name := range names {
		machines[name] = f.newMachine(t, name)
		all = append(all, machines[name])
	}
	f.inventoried(t, all...)
	renewed := machines["known"].attested(t)
	machines["deleted"].attested(t)
	// Somebody else has the name.
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
	refused := func(name string) {
		t.Helper()
		p := f.newPeer(t, machines[name].chip, f.asToken(machines[name].token), name, name)
		hello := p.hello(t)
		eventually(t, 20*time.Second, "the hello is answered", func() bool {
			hello = f.get(t, hello.Name)
			return len(hello.Annotations) > 0 || reasonOf(hello) != ""
		})
		if reasonOf(hello) == "" {
			f.refused(t, p.file(t, p.proof(t, hello)), string(verifier.ReasonAmbiguousName))
		} else {
			f.refused(t, hello, string(verifier.ReasonAmbiguousName))
		}
	}
	freed := other("freed")
	refused("freed")
	eventually(t, 20*time.Second, "it goes by the watch", func() bool {
		dog.counted()
		_, proof := renewed.attests(t)
		f.issued(t, proof, "known")
		return dog.counted() == 0
	})

	dog.hang()
	t.Run("renewed", func(t *testing.T) {
		for range 3 { // what it wrote itself is known
			_, proof := renewed.attests(t)
			f.issued(t, proof, "known")
		}
		if n := dog.counted(); n != 3*2 { // and that nobody else has its name and EK is asked
			t.Errorf("%d lists", n)
		}
	})
	t.Run("its record was deleted", func(t *testing.T) {
		record := f.record(t, "deleted")
		remove(t, f, record)
		machines["deleted"].attested(t)
		if got := f.record(t, "deleted"); got.UID == record.UID || len(got.Status.Certificates) != 1 {
			t.Errorf("%+v", got)
		}
	})
	t.Run("another's record was deleted", func(t *testing.T) {
		remove(t, f, freed)
		machines["freed"].attested(t)
	})
	t.Run("another's record was made", func(t *testing.T) {
		taken := other("taken")
		refused("taken")
		refused("taken")
		remove(t, f, taken)
		machines["taken"].attested(t)
	})
	t.Run("its record was made", func(t *testing.T) {
		node := machines["new"].attested(t)
		record := f.record(t, "new")
		remove(t, f, record)
		time.Sleep(16 * time.Second) // until what was written here is forgotten
		record.ResourceVersion, record.UID = "", ""
		if err := f.client.Create(t.Context(), record); err != nil {
			t.Fatal(err)
		}
		_, proof := node.attests(t)
		f.issued(t, proof, "new")
	})
	dog.goOn()
	for _, m := range machines {
		m.attested(t)
	}
	if n := f.records(t); n != len(machines) {
		t.Errorf("%d records of %d machines", n, len(machines))
	}
}
