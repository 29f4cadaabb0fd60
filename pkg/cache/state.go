// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
)

// fileVersion is the version of the two JSON files. A file of another version is set aside.
const fileVersion = 1

// Pending is the request under way. It is written before the network call that it describes. So
// after a crash the next worker continues with the same key and the same names, and does not file
// the request twice.
type Pending struct {
	Version int `json:"version"`
	// The settings of the request, to notice that the operator has changed them.
	Provider          string `json:"provider"`
	NodeName          string `json:"nodeName"`
	ProviderID        string `json:"providerID,omitempty"`
	SignerName        string `json:"signerName"`
	ExpirationSeconds *int32 `json:"expirationSeconds,omitempty"`
	// Cluster is where the requests were filed.
	Cluster Origin `json:"cluster"`
	// Requester identifies the credential that the hello was filed with. It is "node" for the
	// node's own certificate, else a hash of the credential. The proof has to be filed with the
	// same one.
	Requester string `json:"requester,omitempty"`
	// Key is the private key in PEM. It is never logged.
	Key []byte `json:"key"`
	// AttestationVersion is that of the hello's document. Remember is what its provider wants
	// back next time if a certificate is issued. Both are empty for a provider that files no
	// hello.
	AttestationVersion string `json:"attestationVersion,omitempty"`
	Remember           string `json:"remember,omitempty"`
	// Requests are the CertificateSigningRequests in flight, in the order of filing. There is
	// one, unless the provider's protocol has more rounds.
	Requests []PendingRequest `json:"requests"`
}

// Last returns the newest request. It may not be filed yet. There is at least one.
func (p *Pending) Last() *PendingRequest { return &p.Requests[len(p.Requests)-1] }

// PendingRequest is one CertificateSigningRequest in flight.
type PendingRequest struct {
	// Name is the object's name, random and chosen here.
	Name string `json:"name"`
	// Hello is set if this is a hello: the worker waits for its answer, not for a certificate.
	Hello bool `json:"hello,omitempty"`
	// UID is the object's UID once the API server has returned it. It is empty until the object is
	// known to exist.
	UID string `json:"uid,omitempty"`
	// Request is spec.request. An object of that name is ours only if it holds these very
	// bytes.
	Request []byte `json:"request"`
	// FiledAt is when the name was chosen, shortly before the first attempt to file the object.
	FiledAt time.Time `json:"filed"`
}

// State is how the last worker ended, and when the next may begin.
type State struct {
	Version int `json:"version"`
	// Last is nil until a worker has ended.
	Last *Result `json:"last,omitempty"`
	// Failures counts the workers in a row that failed for causes of one kind.
	Failures int `json:"failures,omitempty"`
	// Refusals counts the workers since the last success whose request was denied, failed or
	// given up. It restarts when a request becomes pending after a failure of another kind, such as
	// of the network.
	Refusals int `json:"refusals,omitempty"`
	// Issued is when a certificate was issued last. Hasty counts the certificates in a row that
	// were issued soon after the one before.
	Issued time.Time `json:"issued,omitzero"`
	Hasty  int       `json:"hasty,omitempty"`
	// Provider made the request of the last certificate. It is empty before the first certificate,
	// and in files of earlier releases.
	Provider string `json:"provider,omitempty"`
	// Choice is the provider that the setting "auto" chose before the first certificate. It is nil
	// if nothing was chosen.
	Choice *Choice `json:"choice,omitempty"`
	// Remembered is what each provider wanted back with its last certificate.
	Remembered map[string]string `json:"remembered,omitempty"`
	// SpentBootstrap is the SHA-256 of the bootstrap kubeconfig that was deleted last. It is
	// not copied again.
	SpentBootstrap string `json:"spentBootstrap,omitempty"`
	// Waiting is what the pending request waits for. It is nil until the controller has written a
	// reason.
	Waiting *Waiting `json:"waiting,omitempty"`
	// Announcement is what the checks for announced renewals have found. It is nil before the first
	// check.
	Announcement *Announcement `json:"announcement,omitempty"`
	// NextAttempt is the earliest start of the next worker.
	NextAttempt time.Time `json:"nextAttempt,omitzero"`
	// UrgentAttempt is the same for a certificate that cannot wait. It is zero if NextAttempt
	// applies to both.
	UrgentAttempt time.Time `json:"urgentAttempt,omitzero"`
}

// Choice is a provider that the program chose, and why.
type Choice struct {
	Provider string `json:"provider"`
	Why      string `json:"why"`
}

// Announcement is what the checks for announced renewals have found, and whether the node has
// reported its certificate. Peers wrote the texts in it.
type Announcement struct {
	// Checked is when the last check began. UnderWay is set until it has ended.
	Checked  time.Time `json:"checked"`
	UnderWay bool      `json:"underWay,omitempty"`
	// Worker is the process of the last check. It is zero once the process also requests a
	// certificate. If the process dies before that, no request was lost.
	Worker process.ID `json:"worker,omitzero"`
	// Answered is the time of the last successful check. Problem says why the last check failed. It
	// is empty after a success.
	Answered time.Time `json:"answered,omitzero"`
	Problem  string    `json:"problem,omitempty"`
	// Exists is set if the cluster announces renewals, as of Answered.
	Exists bool `json:"exists,omitempty"`
	// Renewal is the announced renewal that selects the certificate with the SHA-256 in
	// Certificate, nil if none does. It does not apply to another certificate.
	Certificate string   `json:"certificate,omitempty"`
	Renewal     *Renewal `json:"renewal,omitempty"`
	// Done are the announced renewals after which this node got another certificate.
	Done []Renewal `json:"done,omitempty"`
	// Reported is the SHA-256 of the certificate that the annotation of the Node has. NotReported
	// is the SHA-256 of the certificate for which the last write of the annotation failed.
	// ReportProblem says why.
	Reported      string `json:"reported,omitempty"`
	NotReported   string `json:"notReported,omitempty"`
	ReportProblem string `json:"reportProblem,omitempty"`
}

// Renewal is an announced renewal. Name and IssuedBefore identify it: a name can be used again.
type Renewal struct {
	Name         string    `json:"name"`
	IssuedBefore time.Time `json:"issuedBefore"`
	// DueAt is when this node renews.
	DueAt time.Time `json:"dueAt"`
}

// Same reports whether two are the same renewal.
func (r Renewal) Same(other Renewal) bool {
	return r.Name == other.Name && r.IssuedBefore.Equal(other.IssuedBefore)
}

// Waiting is what the controller has written last into a request that waits. It is in the state
// file, since an earlier release treats a pending file with an unknown field as damaged.
type Waiting struct {
	// Request is the name of the CertificateSigningRequest. Another one has another cause.
	Request string `json:"request"`
	// Annotation is the value of the annotation. A peer wrote it.
	Annotation string `json:"annotation"`
}

// Result is how one worker ended.
type Result struct {
	// Worker is the process.
	Worker process.ID `json:"worker"`
	// Reason is the name of the reason for its failure, empty after a success.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	Hint    string `json:"hint,omitempty"`
	// Request is the name of the last CertificateSigningRequest it worked on.
	Request  string    `json:"request,omitempty"`
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished"`
	// Wasted is set if a request was filed and then given up. Then the back-off is longer.
	Wasted bool `json:"wasted,omitempty"`
	// Phases are the steps it went through, in order.
	Phases []Phase `json:"phases,omitempty"`
}

// Phase is the time one step took.
type Phase struct {
	Name         string  `json:"name"`
	Milliseconds float64 `json:"milliseconds"`
}

// parsePending reads a pending file strictly.
func parsePending(data []byte) (*Pending, error) {
	var p Pending
	if err := decodeFile(data, &p, true); err != nil {
		return nil, err
	}
	if p.Version != fileVersion {
		return nil, errors.New("it was written by another version of this program")
	}
	if p.NodeName == "" || p.Provider == "" || p.SignerName == "" || p.Cluster.Server == "" || len(p.Key) == 0 || len(p.Requests) == 0 {
		return nil, errors.New("it is incomplete")
	}
	for _, r := range p.Requests {
		if r.Name == "" || len(r.Request) == 0 {
			return nil, errors.New("it is incomplete")
		}
	}
	return &p, nil
}

// parseState reads a state file. It ignores unknown fields: another release may have written them,
// and what the provider is to remember must not be lost.
func parseState(data []byte) (*State, error) {
	var s State
	if err := decodeFile(data, &s, false); err != nil {
		return nil, err
	}
	if s.Version != fileVersion || s.Failures < 0 || s.Refusals < 0 || s.Hasty < 0 {
		return nil, errors.New("it was written by another version of this program")
	}
	return &s, nil
}

// decodeFile never quotes the content, which may be a key.
func decodeFile(data []byte, into any, strict bool) error {
	decoder := json.NewDecoder(bytes.NewReader(data))
	if strict {
		decoder.DisallowUnknownFields()
	}
	if err := decoder.Decode(into); err != nil {
		return errors.New("it is not the JSON that this program writes")
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is data after its JSON")
	}
	return nil
}

// Pending returns the request under way, nil if there is none. If MustBeSetAside returns true for
// the error, call SetAside.
func (d Dir) Pending() (*Pending, error) {
	return readJSON(d, PendingFile, parsePending)
}

// State returns how the last worker ended. It is the zero State if none has ended.
func (d Dir) State() (*State, error) {
	s, err := readJSON(d, StateFile, parseState)
	if s == nil && err == nil {
		s = &State{}
	}
	return s, err
}

func readJSON[T any](d Dir, name string, parse func([]byte) (*T, error)) (*T, error) {
	data, exposed, err := d.Read(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	case exposed && name == PendingFile:
		// Unlike the current certificate, a pending key can be replaced without loss.
		return nil, &damagedFileError{d.File(name), "others may read the key in it"}
	}
	content, err := parse(data)
	if err != nil {
		return nil, &damagedFileError{d.File(name), err.Error()}
	}
	return content, nil
}

// SetPending writes the request under way, durably.
func (l *Lock) SetPending(p *Pending) error {
	p.Version = fileVersion
	return l.writeJSON(PendingFile, p)
}

// ForgetPending removes the pending file and the key in it.
func (l *Lock) ForgetPending() error { return l.dir.remove(PendingFile) }

// RemoveBootstrap removes the bootstrap kubeconfig.
func (l *Lock) RemoveBootstrap() error { return l.dir.remove(BootstrapFile) }

// SetState writes how the last worker ended.
func (l *Lock) SetState(s *State) error {
	s.Version = fileVersion
	return l.writeJSON(StateFile, s)
}

func (l *Lock) writeJSON(name string, content any) error {
	data, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return err
	}
	return l.dir.Write(name, append(data, '\n'))
}
