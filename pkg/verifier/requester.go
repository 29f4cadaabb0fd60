// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"
	"strings"
	"time"
)

// Users, groups and extra that the API server's authenticators set. The API server itself writes
// spec.username, uid, groups and extra.
const (
	userBootstrap      = "system:bootstrap:"
	userNode           = "system:node:"
	groupBootstrappers = "system:bootstrappers"
	groupNodes         = "system:nodes"
	groupMasters       = "system:masters"

	x509Prefix = "X509SHA256="
)

// ExtraCredentialID is the key in spec.extra under which the API server identifies the credential
// that a request was filed with.
const ExtraCredentialID = "authentication.kubernetes.io/credential-id"

// forbiddenGroup reports whether no bootstrap identity may be in that group.
func forbiddenGroup(group string) bool { return group == groupNodes || group == groupMasters }

// Token says which machine a bootstrap token was made for. The zero value means that this is not
// known yet.
type Token struct {
	Known bool
	// Machine is that machine, or the zero value if the token was made for none.
	Machine MachineRef
}

// checkRequester applies I1 and I2. It returns the class that follows from the requester: First or
// Renewal.
func (r *Rules) checkRequester(q request) (class Class, f findings) {
	spec := q.object.Spec
	if strings.HasPrefix(spec.Username, userNode) {
		return Renewal, checkNode(q)
	}
	group, ok := r.bootstrapGroup(spec.Username)
	if !ok {
		f.deny(ReasonRequesterNotAllowed, "requester: is neither a bootstrap identity nor a node")
		return 0, f
	}
	if !slices.Contains(spec.Groups, group) {
		f.deny(ReasonRequesterNotAllowed, "requester: is not in the group of bootstrap identities")
	}
	if slices.ContainsFunc(spec.Groups, forbiddenGroup) {
		f.deny(ReasonRequesterNotAllowed, "requester: a bootstrap identity is not in %s or %s", groupNodes, groupMasters)
	}
	return First, f
}

// checkNode applies I2.
func checkNode(q request) (f findings) {
	spec := q.object.Spec
	if q.kind.insecure {
		f.deny(ReasonRequesterNotAllowed, "requester: this signer renews no certificate")
	}
	if !slices.Contains(spec.Groups, groupNodes) || slices.Contains(spec.Groups, groupMasters) {
		f.deny(ReasonRequesterNotAllowed, "requester: a node is in %s, and not in %s", groupNodes, groupMasters)
	}
	if q.cert.nodeName != "" && spec.Username != userNode+q.cert.nodeName {
		f.deny(ReasonRequesterNotAllowed, "requester: a node asks for itself only")
	}
	return f
}

// bootstrapGroup returns the group that a bootstrap identity must have, and whether the user is
// one.
func (r *Rules) bootstrapGroup(username string) (string, bool) {
	if isToken(username) {
		return r.policy.TokenGroup, true
	}
	for _, b := range r.policy.Bootstrappers {
		if b.Username == username {
			return b.Group, true
		}
	}
	return "", false
}

// TokenID returns the ID of the bootstrap token that a user authenticated with: six of [a-z0-9]
// after system:bootstrap:. It returns false for other users.
func TokenID(username string) (string, bool) {
	id, ok := strings.CutPrefix(username, userBootstrap)
	return id, ok && len(id) == 6 && strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") == ""
}

func isToken(username string) bool {
	_, ok := TokenID(username)
	return ok
}

// checkToken applies I3. A machine with a record may request with any token only if an authority
// names its evidence now. selectOnFirstUse applies I3 itself.
func (r *Rules) checkToken(q request, s subject, token Token) findings {
	again := s.class == Again && !q.kind.insecure && s.machine != nil && !r.namedByAuthority(s)
	if s.class != First && !again || s.trustedOnFirstUse {
		return findings{}
	}
	if q.kind.insecure { // the token is the only evidence
		return checkTokenOf(s.machine, q.object.Spec.Username, token, Required)
	}
	if !isToken(q.object.Spec.Username) {
		return findings{} // a Bootstrapper, which the operator trusts for all machines
	}
	return checkTokenOf(s.machine, q.object.Spec.Username, token, r.policy.Token)
}

// checkTokenOf checks that the requester has the bootstrap token of this machine. The machine is
// nil if it is not known.
func checkTokenOf(m *Machine, username string, token Token, mode Mode) (f findings) {
	switch {
	case !isToken(username):
		f.deny(ReasonTokenNotForMachine, "requester: did not come with a bootstrap token")
	case !token.Known && mode == Required:
		f.wait(ReasonTokenNotForMachine, "requester: it is not known yet which machine the token was made for")
	case !token.Known:
		f.fail(mode, ReasonTokenNotForMachine, "requester: it is not known which machine the token was made for")
	case token.Machine.Name == "":
		f.fail(mode, ReasonTokenNotForMachine, "requester: the token was made for no machine")
	case m != nil && token.Machine != m.Ref:
		f.fail(mode, ReasonTokenNotForMachine, "requester: the token was made for another machine")
	}
	return f
}

// checkCredential applies I4. recovered is the requester's certificate, if the record is to be
// recreated for it.
func (r *Rules) checkCredential(in Input, q request, s subject) (recovered string, f findings) {
	mode := r.policy.Credential
	if s.class != Renewal && s.class != Serving || s.machine == nil {
		return "", f
	}
	if q.kind.rehearsal && s.record == nil {
		return "", f // the node has not attested yet: its first real request has a bootstrap credential
	}
	mayRecover := mode == Recover && s.class == Renewal && r.namedByAuthority(s) && s.record.isStale(in.Now)
	if mode == Recover {
		mode = Required
	}
	ids := q.object.Spec.Extra[ExtraCredentialID]
	if len(ids) != 1 || !strings.HasPrefix(ids[0], x509Prefix) || ids[0] == x509Prefix {
		f.fail(mode, ReasonUnknownCredential, "requester: the API server names no certificate, or more than one")
		return "", f
	}
	fingerprint := strings.TrimPrefix(ids[0], x509Prefix)
	listedFor := func(record Record) bool { return record.Machine != s.machine.Ref && record.lists(fingerprint) }
	switch {
	case s.record == nil && mayRecover:
		f.warn(ReasonRecordRecovered, "record: the machine had none, and gets a new one")
		return fingerprint, f
	case s.record == nil:
		f.fail(mode, ReasonUnknownCredential, "requester: the machine has no record")
	case s.record.isFor(q.object) && len(s.record.FormerEKs) > 0:
		// A new board with the old disk requests with a certificate of the former key. That
		// certificate was checked before the record was written for this request. Since that write
		// it vouches for no request.
	case s.class == Serving && s.record.revoked(fingerprint):
		f.deny(ReasonCertificateRevoked, "requester: its certificate is revoked")
	case s.record.lists(fingerprint) && (s.class != Serving || !s.record.recovered(fingerprint)):
		// A renewal also has evidence. So a revoked certificate suffices. So does a recovered one,
		// which may have been issued without attestation.
	case mayRecover && !slices.ContainsFunc(in.Records, listedFor):
		f.warn(ReasonRecordRecovered, "record: it does not have the requester's certificate, as after a restore from a backup")
		return fingerprint, f
	case s.record.AwaitsCertificate() && mode == Required:
		f.wait(ReasonUnknownCredential, "requester: the certificate is not in the record yet")
	default:
		f.fail(mode, ReasonUnknownCredential, "requester: the certificate is not in the record")
	}
	return "", f
}

// isStale reports whether the record is missing (nil), or older than the requester's valid
// certificate. It is older if all its certificates have expired. That also covers a record from a
// backup. A node renews when more than half of the lifetime is over. So the certificates in the
// backup expire before the node's current one. If a certificate in the record is valid, an unknown
// certificate was issued without attestation. A recovered certificate does not count, because its
// end is not known.
func (r *Record) isStale(now time.Time) bool {
	return r == nil || !slices.ContainsFunc(r.Certificates, func(c Certificate) bool {
		return !c.Recovered && (now.Before(c.NotAfter) || c.NotAfter.IsZero())
	})
}
