// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// Where the controller announces that nodes are to renew, in the cluster that they join. Every node
// may read this ConfigMap, and nothing in it is secret.
const (
	AnnouncementNamespace = "kube-public"
	AnnouncementName      = "node-attestation-renewal"
	AnnouncementKey       = "renewals.json"
)

// AnnotationCertificate is on a Node: the SHA-256 of the certificate that its kubelet uses, in hex.
// The node writes it. So it is only a claim. At most it makes an old certificate of this node be
// revoked earlier.
const AnnotationCertificate = "attestation.cluster.x-k8s.io/certificate"

// MaxAnnouncement limits an announcement, in bytes.
const MaxAnnouncement = 256 << 10

// announcementVersion is the version of the format. maxRenewalName is the maximum length of a
// Renewal's name in bytes, as of any name in Kubernetes.
const announcementVersion, maxRenewalName = 1, 253

// Announcement is what the ConfigMap's entry holds, in JSON. A node ignores fields that it does not
// know.
type Announcement struct {
	Version int `json:"version"`
	// Renewals are those under way.
	Renewals []Renewal `json:"renewals"`
}

// Renewal asks nodes to renew their certificates.
type Renewal struct {
	// Name identifies it.
	Name string `json:"name"`
	// IssuedBefore selects the certificates that were issued before it. A node compares the start
	// of its certificate, which is backdated. So a node may renew once more than necessary.
	IssuedBefore time.Time `json:"issuedBefore"`
	// All selects all nodes, and Nodes those of these names.
	All   bool     `json:"all,omitempty"`
	Nodes []string `json:"nodes,omitempty"`
	// Start is when the first nodes renew. Over the next SpreadSeconds the others follow.
	Start         time.Time `json:"start"`
	SpreadSeconds int       `json:"spreadSeconds,omitempty"`
}

// ParseAnnouncement parses the entry of the ConfigMap. The empty entry announces nothing.
func ParseAnnouncement(data []byte) (Announcement, error) {
	var a Announcement
	if len(data) == 0 {
		return a, nil
	}
	if len(data) > MaxAnnouncement {
		return a, fmt.Errorf("announcement: is longer than %d bytes", MaxAnnouncement)
	}
	if err := json.Unmarshal(data, &a); err != nil {
		return Announcement{}, fmt.Errorf("announcement: %w", err)
	}
	if a.Version != announcementVersion {
		return Announcement{}, fmt.Errorf("announcement: version %d is unknown", a.Version)
	}
	for _, r := range a.Renewals {
		if r.IssuedBefore.IsZero() || r.Start.IsZero() || r.SpreadSeconds < 0 {
			return Announcement{}, errors.New("announcement: a renewal without issuedBefore or start, or with a negative spread")
		}
		if r.Name == "" || len(r.Name) > maxRenewalName {
			return Announcement{}, fmt.Errorf("announcement: a renewal whose name has %d bytes", len(r.Name))
		}
	}
	return a, nil
}

// Marshal returns the entry of the ConfigMap.
func (a Announcement) Marshal() ([]byte, error) {
	a.Version = announcementVersion
	data, err := json.Marshal(a)
	if err == nil && len(data) > MaxAnnouncement {
		return nil, fmt.Errorf("announcement: is longer than %d bytes", MaxAnnouncement)
	}
	return data, err
}

// Due returns the name and the time of the renewal by which a node must renew a certificate that
// begins at notBefore. If there are several, it returns the earliest. done are the names of the
// renewals that the node has already carried out. due is false if there is no renewal.
func (a Announcement) Due(node string, notBefore time.Time, done []string) (name string, at time.Time, due bool) {
	for _, r := range a.Renewals {
		if !notBefore.Before(r.IssuedBefore) || !r.All && !slices.Contains(r.Nodes, node) || slices.Contains(done, r.Name) {
			continue
		}
		if moment := r.moment(node); !due || moment.Before(at) {
			name, at, due = r.Name, moment, true
		}
	}
	return name, at, due
}

// moment returns the time within the spread at which a node renews, but not a time before
// IssuedBefore: then the renewal would select the new certificate, too. The moment depends only on
// the renewal and the node's name, so each check computes the same time.
func (r Renewal) moment(node string) time.Time {
	sum := sha256.Sum256([]byte(r.Name + "\x00" + node))
	fraction := float64(binary.BigEndian.Uint64(sum[:])) / math.MaxUint64
	moment := r.Start.Add(time.Duration(fraction * float64(r.SpreadSeconds) * float64(time.Second)))
	if moment.Before(r.IssuedBefore) {
		return r.IssuedBefore
	}
	return moment
}

// The API server's answers, with status 403, to a write with a revoked certificate, or of a
// suspended machine. More text may follow. MessageUnrecorded is for a certificate that no record
// names, in strict mode of the authorizer.
const (
	MessageRevoked    = "this certificate was revoked: the node may only attest for a new one"
	MessageSuspended  = "this machine is suspended by an operator"
	MessageUnrecorded = "no record names this certificate: the node may only attest for a new one"
)
