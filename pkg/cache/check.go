// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"fmt"
	"slices"
	"time"
)

// The prefix of a node's user name, and a node's group (Kubernetes documentation, "Node
// authorization").
const (
	nodePrefix = "system:node:"
	nodesGroup = "system:nodes"
)

// maxClockLead is how far a certificate's NotBefore may be ahead of this machine's clock. A machine
// that has just booted may not have the right time yet.
const maxClockLead = 10 * time.Minute

// UnusableError says why a node may not present a certificate.
type UnusableError struct {
	Problem string
	// Clock is set if the certificate is valid at another time: it has not begun, or has ended.
	Clock bool
	// Early is set if it has not begun, by this machine's clock.
	Early bool
}

func (e *UnusableError) Error() string { return "certificate: " + e.Problem }

// CheckNodeCertificate returns an *UnusableError unless leaf is a client certificate for that node
// alone, at the time now. Its whole subject is O=system:nodes, CN=system:node:<name>. It is for
// client authentication (RFC 5280, section 4.2.1.12) and not a CA. NotBefore is at most
// maxClockLead ahead, and NotAfter is not reached. An empty name accepts any node.
func CheckNodeCertificate(leaf *x509.Certificate, name string, now time.Time) error {
	if err := checkSubject(leaf, name); err != nil {
		return err
	}
	clientAuth := slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageClientAuth) || slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageAny)
	switch {
	case !clientAuth:
		return &UnusableError{Problem: "it does not allow client authentication"}
	case leaf.IsCA:
		return &UnusableError{Problem: "it is a CA certificate"}
	case !leaf.NotBefore.Before(leaf.NotAfter):
		return &UnusableError{Problem: "it ends before it begins"}
	case leaf.NotBefore.After(now.Add(maxClockLead)):
		return &UnusableError{Problem: fmt.Sprintf("it is not valid before %s, and this machine's clock says %s", leaf.NotBefore.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339)), Clock: true, Early: true}
	case !now.Before(leaf.NotAfter):
		return &UnusableError{Problem: fmt.Sprintf("it expired at %s, and this machine's clock says %s", leaf.NotAfter.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339)), Clock: true}
	}
	return nil
}

// checkSubject reads the raw subject: pkix.Name keeps the last of several common names.
func checkSubject(leaf *x509.Certificate, name string) error {
	var subject pkix.RDNSequence
	rest, err := asn1.Unmarshal(leaf.RawSubject, &subject)
	if err != nil || len(rest) > 0 {
		return &UnusableError{Problem: "its subject does not parse"}
	}
	var organizations, names []string
	for _, set := range subject {
		for _, attribute := range set {
			value, _ := attribute.Value.(string)
			switch {
			case attribute.Type.Equal(asn1.ObjectIdentifier{2, 5, 4, 10}):
				organizations = append(organizations, value)
			case attribute.Type.Equal(asn1.ObjectIdentifier{2, 5, 4, 3}):
				names = append(names, value)
			default:
				return &UnusableError{Problem: "its subject holds more than an organization and a common name"}
			}
		}
	}
	if !slices.Equal(organizations, []string{nodesGroup}) {
		return &UnusableError{Problem: fmt.Sprintf("its organization is not %s alone", nodesGroup)}
	}
	if len(names) != 1 || len(names[0]) <= len(nodePrefix) || names[0][:len(nodePrefix)] != nodePrefix {
		return &UnusableError{Problem: "its common name is not that of a node"}
	}
	if got := names[0][len(nodePrefix):]; name != "" && got != name {
		return &UnusableError{Problem: fmt.Sprintf("it is for node %.253q, not for %q", got, name)}
	}
	return nil
}

// SameKey reports whether the certificate holds this public key.
func SameKey(leaf *x509.Certificate, key crypto.PublicKey) bool {
	der, err := x509.MarshalPKIXPublicKey(key)
	return err == nil && bytes.Equal(der, leaf.RawSubjectPublicKeyInfo)
}
