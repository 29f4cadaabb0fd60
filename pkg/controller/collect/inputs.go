// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"slices"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Inputs has everything that one decision is made from: the Input of the rules, and what acting on
// the decision needs beside it. Nothing changes it once it is complete.
type Inputs struct {
	verifier.Input
	Claim    verifier.Claim
	Provider evidence.Provider
	// Challenger is the provider, if it has two rounds, else nil.
	Challenger evidence.Challenger
	// ek is the claimed EK. EKNamed says that a source or a record names it, or that it is trusted
	// on first use.
	ek      string
	EKNamed bool
	// Objects are the objects behind Records, in the same order.
	Objects []v1alpha1.NodeAttestation
	// subject describes the request, without its class. It parses the hello once, also for the
	// inputs that Approved returns.
	subject func() Subject
}

// Complete returns the inputs when nothing is added any more.
func (in *Inputs) Complete() *Inputs {
	in.subject = sync.OnceValue(func() Subject {
		return Describe(in.Provider, in.Request, in.Hello, in.Claim, in.Evidence, 0)
	})
	return in
}

// Approved returns the inputs of the decision to sign, which follows an approval. They have the
// request and the record as the API server stored them.
func (in *Inputs) Approved(request *certificatesv1.CertificateSigningRequest, object *v1alpha1.NodeAttestation, record verifier.Record) *Inputs {
	next := *in
	next.Request, next.Objects, next.Records = request, slices.Clone(in.Objects), slices.Clone(in.Records)
	next.set(object, record)
	return &next
}

// question returns the Question for the provider. It is complete after addHello.
func (in *Inputs) question() evidence.Question {
	return evidence.Question{Request: in.Request, Hello: in.Hello, Named: in.EKNamed, Now: in.Now}
}

// QueueClaim returns the claim by which the queue orders the request.
func (in *Inputs) QueueClaim() fairqueue.Claim {
	return fairqueue.Claim{EK: in.ek, Node: in.Claim.NodeName, Proof: !in.Claim.Hello}
}

// IsRecorded reports whether status.request of a record is this request.
func (in *Inputs) IsRecorded() bool {
	return slices.ContainsFunc(in.Objects, func(r v1alpha1.NodeAttestation) bool { return records.IsOf(&r, in.Request.UID) })
}

// RecordFor returns a copy of the object that holds a machine's record, nil if there is none yet.
func (in *Inputs) RecordFor(machine verifier.MachineRef) *v1alpha1.NodeAttestation {
	for i := range in.Objects {
		if in.Records[i].Machine == machine {
			return in.Objects[i].DeepCopy()
		}
	}
	return nil
}

// Has reports whether this version of a record is among the inputs.
func (in *Inputs) Has(object *v1alpha1.NodeAttestation) bool {
	return slices.ContainsFunc(in.Objects, func(r v1alpha1.NodeAttestation) bool { return records.IsSameVersion(&r, object) })
}

// set adds a record, in place of another version of it.
func (in *Inputs) set(object *v1alpha1.NodeAttestation, record verifier.Record) {
	for i := range in.Objects {
		if in.Objects[i].UID == object.UID {
			in.Objects[i], in.Records[i] = *object, record
			return
		}
	}
	in.Objects, in.Records = append(in.Objects, *object), append(in.Records, record)
}

// clockSkew is how far a replica's clock may be behind the API server's.
const clockSkew = 10 * time.Second

// attestedSince reports whether a record may have been attested since a hello was filed. Other
// writes of the record, such as its certificate, do not count.
func (in *Inputs) attestedSince(hello *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(in.Objects, func(r v1alpha1.NodeAttestation) bool {
		return r.Status.LastAttested == nil || r.Status.LastAttested.Add(clockSkew).After(hello.CreationTimestamp.Time)
	})
}

// MachineRef returns the machine in the grant. Without a grant it returns the machine that the
// evidence names or a source lists with the EK, if there is exactly one. For a serving certificate
// it returns the machine in the node's record.
func (in *Inputs) MachineRef(granted verifier.Record) verifier.MachineRef {
	refs := map[verifier.MachineRef]bool{}
	switch {
	case granted.Machine != (verifier.MachineRef{}):
		return granted.Machine
	case in.Claim.Serving:
		for _, record := range in.Records {
			if record.NodeName == in.Claim.NodeName {
				refs[record.Machine] = true
			}
		}
	default:
		named := in.Evidence.Machine
		for i := range in.Machines {
			if m := &in.Machines[i]; in.hasEK(m) || named != "" && m.Ref.Name == named {
				refs[m.Ref] = true
			}
		}
	}
	if len(refs) != 1 {
		return verifier.MachineRef{}
	}
	for ref := range refs {
		return ref
	}
	return verifier.MachineRef{}
}

// hasEK reports whether a source names for the machine the claimed EK, or the one that the provider
// found. A provider of one round claims none before.
func (in *Inputs) hasEK(m *verifier.Machine) bool { return m.HasEK(in.ek) || m.HasEK(in.Evidence.EK) }

// markOrphans marks the records whose machine no longer exists.
func (in *Inputs) markOrphans() {
	exists := map[verifier.MachineRef]bool{}
	for i := range in.Machines {
		exists[in.Machines[i].Ref] = true
	}
	for i := range in.Records {
		in.Records[i].Orphaned = !exists[in.Records[i].Machine]
	}
}
