// SPDX-License-Identifier: Apache-2.0

package records

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// nameOf returns the object's name. It depends on the machine alone, so that if two replicas create
// the record, one gets AlreadyExists.
func nameOf(record verifier.Record) string {
	if name := record.Machine.Name; len(validation.IsDNS1123Subdomain(name)) == 0 {
		return name
	}
	return "machine-" + digestOf(record.Machine.Name)
}

// clusterLabel returns the value of v1alpha1.LabelCluster.
func clusterLabel(cluster string) string {
	if len(validation.IsValidLabelValue(cluster)) == 0 {
		return cluster
	}
	return "sha256-" + digestOf(cluster)
}

// digestOf returns the first half of a SHA-256, in hex. It replaces a text that cannot be part of a
// name.
func digestOf(value string) string {
	sum := sha256.Sum256([]byte(value))
	return hex.EncodeToString(sum[:16])
}

// recordOf converts a record for the rules, without its owner.
func recordOf(object *v1alpha1.NodeAttestation) verifier.Record {
	record := verifier.Record{
		Cluster:  object.Spec.Cluster,
		Machine:  verifier.MachineRef{Name: object.Spec.Machine.Name, UID: string(object.Spec.Machine.UID)},
		Provider: object.Spec.Provider, AK: object.Spec.AKName,
		ProviderID: object.Spec.ProviderID, NodeName: object.Spec.NodeName,
		FirstProofUID: string(object.Status.FirstRequestUID),
	}
	if object.Spec.EK != nil {
		record.EK, record.EKSource = object.Spec.EK.Fingerprint, verifier.EKSource(object.Spec.EK.Source)
	}
	if i := object.Spec.Instance; i != nil {
		record.Instance = &attestation.Instance{Platform: i.Platform, ID: i.ID, Account: i.Account}
	}
	if r := object.Status.EKReplaced; r != nil {
		record.EKReplacedBy = r.EKs
	}
	for _, former := range object.Status.EKHistory {
		record.FormerEKs = append(record.FormerEKs, former.Fingerprint)
	}
	if b := object.Status.Boot; b != nil {
		record.Boot = &verifier.Boot{Resets: b.Resets, Restarts: b.Restarts, Clock: b.Clock}
	}
	if object.Status.Hello != nil {
		record.HelloUID = string(object.Status.Hello.UID)
	}
	if r := object.Status.Request; r != nil {
		record.ProofUID, record.ProofSHA256 = string(r.UID), r.SHA256
	}
	for _, c := range object.Status.Certificates {
		if c.FormerEK {
			continue
		}
		record.Certificates = append(record.Certificates, verifier.Certificate{SHA256: c.SHA256, ProofUID: string(c.RequestUID), NotAfter: c.NotAfter.Time, Revoked: c.Revoked, Recovered: c.Recovered()})
	}
	return record
}

// SetGrant sets the grant of the rules in the object, and the one request that may be signed. It
// drops the certificates that the rules drop. A certificate of a former EK stays until it ends, so
// that it can be revoked.
func SetGrant(object *v1alpha1.NodeAttestation, record verifier.Record, proof, hello *certificatesv1.CertificateSigningRequest, now time.Time) {
	noteReplacement(object, record, proof, now)
	object.Spec = v1alpha1.NodeAttestationSpec{
		Cluster: record.Cluster, Machine: object.Spec.Machine,
		Provider: record.Provider, ProviderID: record.ProviderID, NodeName: record.NodeName, AKName: record.AK,
	}
	if record.EK != "" {
		object.Spec.EK = &v1alpha1.EndorsementKey{Fingerprint: record.EK, Source: string(record.EKSource)}
	}
	if i := record.Instance; i != nil {
		object.Spec.Instance = &v1alpha1.Instance{Platform: i.Platform, ID: i.ID, Account: i.Account}
	}
	status := &object.Status
	attested := metav1.NewTime(now)
	status.LastAttested, status.FirstRequestUID = &attested, types.UID(record.FirstProofUID)
	status.Boot = nil
	if b := record.Boot; b != nil {
		status.Boot = &v1alpha1.BootCounters{Resets: b.Resets, Restarts: b.Restarts, Clock: b.Clock}
	}
	status.Hello = nil
	if hello != nil {
		status.Hello = &v1alpha1.HelloReference{Name: hello.Name, UID: hello.UID}
	}
	status.Request = &v1alpha1.RequestReference{Name: proof.Name, UID: proof.UID, SHA256: record.ProofSHA256}
	status.Certificates = slices.DeleteFunc(status.Certificates, func(c v1alpha1.IssuedCertificate) bool {
		return !slices.ContainsFunc(record.Certificates, func(kept verifier.Certificate) bool { return kept.SHA256 == c.SHA256 }) &&
			(!c.FormerEK || !now.Before(c.NotAfter.Time))
	})
	for _, c := range record.Certificates {
		if c.Recovered {
			addRecovered(status, c)
		}
	}
}

// addRecovered adds the certificate of the request that recreated the record, unless the record has
// it.
func addRecovered(status *v1alpha1.NodeAttestationStatus, c verifier.Certificate) {
	if slices.ContainsFunc(status.Certificates, func(known v1alpha1.IssuedCertificate) bool { return known.SHA256 == c.SHA256 }) {
		return
	}
	status.Certificates = bounded(append(status.Certificates, v1alpha1.IssuedCertificate{
		SHA256: c.SHA256, NotAfter: metav1.NewTime(c.NotAfter), RequestUID: v1alpha1.RequestRecovered, Noted: true,
	}))
}

// maxEKHistory bounds the former EKs of a record, as the CRD does.
const maxEKHistory = 8

// noteReplacement moves an EK that is about to be replaced into the history.
func noteReplacement(object *v1alpha1.NodeAttestation, record verifier.Record, proof *certificatesv1.CertificateSigningRequest, now time.Time) {
	former := object.Spec.EK
	if former == nil || record.EK == "" || former.Fingerprint == record.EK {
		return
	}
	history := append(object.Status.EKHistory, v1alpha1.FormerEK{
		Fingerprint: former.Fingerprint, Source: former.Source, Replaced: metav1.NewTime(now), RequestUID: proof.UID,
	})
	object.Status.EKHistory = history[max(0, len(history)-maxEKHistory):]
	object.Status.EKReplaced = nil
	// A certificate of the former EK no longer vouches for anything. It stays in the record because
	// it is still valid.
	for i := range object.Status.Certificates {
		object.Status.Certificates[i].FormerEK = true
	}
}

// IsOf reports whether status.request of a record is this request.
func IsOf(record *v1alpha1.NodeAttestation, request types.UID) bool {
	return record.Status.Request != nil && record.Status.Request.UID == request
}

// Requests returns the UIDs of the proof and the hello that the record names.
func Requests(record *v1alpha1.NodeAttestation) (uids []types.UID) {
	if proof := record.Status.Request; proof != nil {
		uids = append(uids, proof.UID)
	}
	if hello := record.Status.Hello; hello != nil {
		uids = append(uids, hello.UID)
	}
	return uids
}

// IsSameVersion reports whether both are the same version of one record.
func IsSameVersion(a, b *v1alpha1.NodeAttestation) bool {
	return a.UID == b.UID && a.ResourceVersion == b.ResourceVersion
}

// HasCertificateFor reports whether the record has a certificate for the request.
func HasCertificateFor(record *v1alpha1.NodeAttestation, request types.UID) bool {
	return slices.ContainsFunc(record.Status.Certificates, func(c v1alpha1.IssuedCertificate) bool { return c.RequestUID == request })
}

// HasCertificate reports whether the record has the certificate with that fingerprint.
func HasCertificate(record *v1alpha1.NodeAttestation, fingerprint string) bool {
	return slices.ContainsFunc(record.Status.Certificates, func(c v1alpha1.IssuedCertificate) bool { return c.SHA256 == fingerprint })
}

// MaxCertificates bounds a record's certificates, as the CRD does. A machine that requests too
// often loses certificates in the record, and is not locked out.
const MaxCertificates = 64

// bounded drops certificates until there are at most MaxCertificates. The last one is new, and the
// one before may be in use. Earlier certificates for the same request go first: they were never
// published. Then revoked ones go, which are in a RevocationSlice, and then those that end first.
// So the record keeps one that ends after each dropped one. Revoking that one stops the dropped
// one, too.
func bounded(all []v1alpha1.IssuedCertificate) []v1alpha1.IssuedCertificate {
	for len(all) > MaxCertificates {
		last := len(all) - 1
		dropped := slices.IndexFunc(all[:last], func(c v1alpha1.IssuedCertificate) bool { return c.RequestUID == all[last].RequestUID && !c.Recovered() })
		if dropped < 0 {
			dropped = slices.IndexFunc(all[:last], func(c v1alpha1.IssuedCertificate) bool { return c.Revoked })
		}
		if dropped < 0 {
			dropped = 0
			for i, c := range all[:last-1] {
				if c.NotAfter.Before(&all[dropped].NotAfter) {
					dropped = i
				}
			}
		}
		all = slices.Delete(all, dropped, dropped+1)
	}
	return all
}

// AddCertificate adds the certificate of a request to its record, before it is published. after is
// the number of the last revocation that is older than the request. It returns the certificate's
// fingerprint.
func AddCertificate(record *v1alpha1.NodeAttestation, request *certificatesv1.CertificateSigningRequest, chain []byte, after int64, now time.Time) (fingerprint string, err error) {
	leaf, err := signing.Leaf(chain)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(leaf.Raw)
	fingerprint = hex.EncodeToString(sum[:])
	var requested *metav1.Time
	if !request.CreationTimestamp.IsZero() {
		requested = request.CreationTimestamp.DeepCopy()
	}
	record.Status.Certificates = slices.DeleteFunc(record.Status.Certificates, func(c v1alpha1.IssuedCertificate) bool { return c.NotAfter.Time.Before(now) })
	record.Status.Certificates = bounded(append(record.Status.Certificates, v1alpha1.IssuedCertificate{
		SHA256: fingerprint, Serial: leaf.SerialNumber.Text(16), NotAfter: metav1.NewTime(leaf.NotAfter), Requested: requested, AfterRevocation: after, RequestUID: request.UID, Noted: true,
	}))
	return fingerprint, nil
}
