// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// behind is how far the watch may be behind what was written.
	behind       = 10 * time.Second
	pollInterval = 20 * time.Millisecond
)

// SignedOnce checks that every proof got one certificate, which never changed, and that no other
// request got one. No request of an honest machine may have been refused. It returns the
// certificates by node name, and takes the watch's word and the audit log's.
func (w *Witness) SignedOnce(ctx context.Context) (issued map[string][][]byte, err error) {
	// A watch comes behind: the last write that anybody knows of has to be in it.
	if err := await(ctx, "nothing is open", func() (bool, error) { return w.Open() == 0, nil }); err != nil {
		return nil, err
	}
	written, err := w.statusWrites()
	if err != nil {
		return nil, err
	}
	all, err := w.sightings()
	wrong := []error{err}
	issued = map[string][][]byte{}
	for _, s := range all {
		want := 1
		if s.hello {
			want = 0
		}
		if why := s.refusal(); !s.hello && why != "" {
			wrong = append(wrong, fmt.Errorf("%s of %s was refused: %s", s.name, s.node, why))
		}
		if len(s.certificates) != want || written[s.name] > want {
			wrong = append(wrong, fmt.Errorf("%s of %s (hello %t): its certificate changed %d times, and was written %d times, not %d",
				s.name, s.node, s.hello, len(s.certificates), written[s.name], want))
		}
		issued[s.node] = append(issued[s.node], s.certificates...)
	}
	return issued, errors.Join(wrong...)
}

// statusWrites returns how often the API server let a certificate be written, by name of the
// request. A write whose caller was killed before it had the answer may be missing: the audit log
// has it as failed.
func (w *Witness) statusWrites() (map[string]int, error) {
	events, err := w.cp.AuditSince(w.mark)
	if err != nil {
		return nil, err
	}
	writes := map[string]int{}
	for _, e := range events {
		done := e.Stage == testbed.StageResponseComplete && e.Code < http.StatusMultipleChoices
		if done && e.Resource == "certificatesigningrequests" && e.Subresource == "status" && e.Verb != "get" {
			writes[e.Name]++
		}
	}
	return writes, nil
}

// HellosAreSettled checks that each open hello has a challenge that may still be answered. Each
// machine's last hello, which led to its certificate, must be closed. An earlier hello may be open
// if the controller was killed before closing it, and the machine filed another proof meanwhile.
// Then the record no longer names the earlier hello.
func (w *Witness) HellosAreSettled(ctx context.Context) (closed, waiting int, err error) {
	err = await(ctx, "what led to a certificate is closed", func() (bool, error) {
		hellos, err := w.lastHellos()
		return err == nil && !slices.ContainsFunc(hellos, func(refusal string) bool { return refusal == "" }), err
	})
	wrong := []error{err}
	all, err := w.sightings()
	wrong = append(wrong, err)
	for _, s := range all {
		if !s.hello {
			continue
		}
		if s.refusal() != "" {
			closed++
			continue
		}
		challenge, err := attestation.ParseChallenge([]byte(s.latest.Annotations[attestation.AnnotationChallenge]))
		if err != nil {
			wrong = append(wrong, fmt.Errorf("hello %s of %s is open: %w", s.name, s.node, err))
		} else if expires := time.Unix(challenge.Expires, 0); expires.Before(time.Now()) {
			wrong = append(wrong, fmt.Errorf("hello %s of %s is open, and its challenge ended at %s", s.name, s.node, expires))
		}
		waiting++
	}
	return closed, waiting, errors.Join(wrong...)
}

// lastHellos returns what became of the hello that each machine's last proof refers to.
func (w *Witness) lastHellos() (refusals []string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := map[string]*sighting{}
	for _, s := range w.all {
		if !s.hello && (last[s.node] == nil || last[s.node].number < s.number) {
			last[s.node] = s
		}
	}
	for _, s := range last {
		content, err := attestation.Parse(s.latest.Spec.Request)
		if err != nil {
			return nil, fmt.Errorf("proof %s of %s: %w", s.name, s.node, err)
		}
		proof, err := attestation.ParseProof(content.Data)
		if err != nil {
			return nil, fmt.Errorf("proof %s of %s: %w", s.name, s.node, err)
		}
		hello := w.all[types.UID(proof.HelloUID)]
		if hello == nil {
			return nil, fmt.Errorf("proof %s of %s refers to no hello", s.name, s.node)
		}
		refusals = append(refusals, hello.refusal())
	}
	return refusals, nil
}

// Machine is what a record says of a machine.
type Machine struct{ Name, ProviderID string }

// OneRecordEach checks that there is one record for each machine, and that every certificate that
// was published is in it. issued are those, by node name. It returns how many certificates are
// noted that nobody was given: a process was killed between noting and publishing.
func OneRecordEach(records []v1alpha1.NodeAttestation, machines []Machine, issued map[string][][]byte) (unpublished int, err error) {
	byNode := map[string][]v1alpha1.NodeAttestation{}
	for _, record := range records {
		byNode[record.Spec.NodeName] = append(byNode[record.Spec.NodeName], record)
	}
	var wrong []error
	if len(records) != len(machines) {
		wrong = append(wrong, fmt.Errorf("%d records of %d machines", len(records), len(machines)))
	}
	for _, m := range machines {
		own := byNode[m.Name]
		if len(own) != 1 || own[0].Spec.ProviderID != m.ProviderID {
			wrong = append(wrong, fmt.Errorf("%s has %d records: %+v", m.Name, len(own), own))
			continue
		}
		noted := map[string]bool{}
		for _, c := range own[0].Status.Certificates {
			noted[c.SHA256] = true
		}
		for _, certificate := range issued[m.Name] {
			fingerprint, err := signing.Fingerprint(certificate)
			if err != nil {
				return 0, err
			}
			if !noted[fingerprint] {
				wrong = append(wrong, fmt.Errorf("%s has a certificate that is in no record", m.Name))
			}
			delete(noted, fingerprint)
		}
		unpublished += len(noted)
	}
	return unpublished, errors.Join(wrong...)
}

func await(ctx context.Context, what string, condition func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, behind)
	defer cancel()
	for {
		holds, err := condition()
		if err != nil || holds {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, ctx.Err())
		case <-time.After(pollInterval):
		}
	}
}
