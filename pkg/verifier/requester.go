// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
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

// judgeRequester applies I1 and I2. It sets the class that follows from the requester: First or
// Renewal.
func (e *evaluation) judgeRequester() {
	spec := e.in.Request.Spec
	if strings.HasPrefix(spec.Username, userNode) {
		e.class = Renewal
		e.judgeNode(spec)
		return
	}
	group, ok := e.rules.bootstrapGroup(spec.Username)
	if !ok {
		e.deny(ReasonRequesterNotAllowed, "requester: is neither a bootstrap identity nor a node")
		return
	}
	e.class = First
	if !slices.Contains(spec.Groups, group) {
		e.deny(ReasonRequesterNotAllowed, "requester: is not in the group of bootstrap identities")
	}
	if slices.ContainsFunc(spec.Groups, forbiddenGroup) {
		e.deny(ReasonRequesterNotAllowed, "requester: a bootstrap identity is not in %s or %s", groupNodes, groupMasters)
	}
}

func (e *evaluation) judgeNode(spec certificatesv1.CertificateSigningRequestSpec) {
	if e.insecure {
		e.deny(ReasonRequesterNotAllowed, "requester: this signer renews no certificate")
	}
	if !slices.Contains(spec.Groups, groupNodes) || slices.Contains(spec.Groups, groupMasters) {
		e.deny(ReasonRequesterNotAllowed, "requester: a node is in %s, and not in %s", groupNodes, groupMasters)
	}
	if e.requested.nodeName != "" && spec.Username != userNode+e.requested.nodeName {
		e.deny(ReasonRequesterNotAllowed, "requester: a node asks for itself only")
	}
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

// judgeToken applies I3, to bootstrap tokens.
func (e *evaluation) judgeToken() {
	mode := e.rules.policy.Token
	if e.insecure {
		mode = Required // the token is the only evidence
	}
	// A machine with a record may request with any token only if an authority names its evidence
	// now.
	again := e.class == Again && !e.insecure && e.machine != nil && !e.namedByAuthority()
	if e.class != First && !again || e.tokenJudged {
		return
	}
	e.tokenJudged = true
	token := e.in.Token
	switch {
	case !isToken(e.in.Request.Spec.Username) && !e.insecure && !e.trustedOnFirstUse:
		// a Bootstrapper, which the operator trusts for all machines
	case !isToken(e.in.Request.Spec.Username):
		e.deny(ReasonTokenNotForMachine, "requester: did not come with a bootstrap token")
	case !token.Known && mode == Required:
		e.wait(ReasonTokenNotForMachine, "requester: it is not known yet which machine the token was made for")
	case !token.Known:
		e.fail(mode, ReasonTokenNotForMachine, "requester: it is not known which machine the token was made for")
	case token.Machine.Name == "":
		e.fail(mode, ReasonTokenNotForMachine, "requester: the token was made for no machine")
	case e.machine != nil && token.Machine != e.machine.Ref:
		e.fail(mode, ReasonTokenNotForMachine, "requester: the token was made for another machine")
	}
}

// judgeCredential applies I4, after findRecord.
func (e *evaluation) judgeCredential() {
	mode := e.rules.policy.Credential
	if e.class != Renewal && e.class != Serving || e.machine == nil {
		return
	}
	if e.rehearsal && e.record == nil {
		return // the node has not attested yet: its first real request has a bootstrap credential
	}
	mayRecover := mode == Recover && e.class == Renewal && e.namedByAuthority() && e.recordIsStale()
	if mode == Recover {
		mode = Required
	}
	ids := e.in.Request.Spec.Extra[ExtraCredentialID]
	if len(ids) != 1 || !strings.HasPrefix(ids[0], x509Prefix) || ids[0] == x509Prefix {
		e.fail(mode, ReasonUnknownCredential, "requester: the API server names no certificate, or more than one")
		return
	}
	fingerprint := strings.TrimPrefix(ids[0], x509Prefix)
	if e.record == nil && mayRecover {
		e.warn(ReasonRecordRecovered, "record: the machine had none, and gets a new one")
		e.recovered = fingerprint
		return
	}
	if e.record == nil {
		e.fail(mode, ReasonUnknownCredential, "requester: the machine has no record")
		return
	}
	if e.record.isFor(e.in.Request) && len(e.record.FormerEKs) > 0 {
		// A new board with the old disk requests with a certificate of the former key. That
		// certificate was judged before the record was written for this request. Since that write
		// it vouches for no request.
		return
	}
	if e.class == Serving && e.record.revoked(fingerprint) {
		e.deny(ReasonCertificateRevoked, "requester: its certificate is revoked")
		return
	}
	// A renewal also has evidence. So a revoked certificate suffices. So does a recovered one,
	// which may have been issued without attestation.
	if e.record.lists(fingerprint) && (e.class != Serving || !e.record.recovered(fingerprint)) {
		return
	}
	if mayRecover && !slices.ContainsFunc(e.in.Records, func(r Record) bool { return r.Machine != e.machine.Ref && r.lists(fingerprint) }) {
		e.warn(ReasonRecordRecovered, "record: it does not have the requester's certificate, as after a restore from a backup")
		e.recovered = fingerprint
		return
	}
	if e.record.AwaitsCertificate() && mode == Required {
		e.wait(ReasonUnknownCredential, "requester: the certificate is not in the record yet")
		return
	}
	e.fail(mode, ReasonUnknownCredential, "requester: the certificate is not in the record")
}

// recordIsStale reports whether the record is missing, or older than the requester's valid
// certificate. It is older if all its certificates have expired. That also covers a record from a
// backup. A node renews when more than half of the lifetime is over. So the certificates in the
// backup expire before the node's current one. If a certificate in the record is valid, an unknown
// certificate was issued without attestation. A recovered certificate does not count, because its
// end is not known.
func (e *evaluation) recordIsStale() bool {
	return e.record == nil || !slices.ContainsFunc(e.record.Certificates, func(c Certificate) bool {
		return !c.Recovered && (e.in.Now.Before(c.NotAfter) || c.NotAfter.IsZero())
	})
}
