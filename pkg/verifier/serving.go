// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"encoding/asn1"
	"errors"
	"net/netip"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// The kinds of a GeneralName (RFC 5280, 4.2.1.6) that a serving certificate may have.
const (
	tagDNSName   = 0x82
	tagIPAddress = 0x87
)

// maxAddresses bounds the names and addresses in one request.
const maxAddresses = 100

// Addresses are DNS names in lower case, and IPs.
type Addresses struct {
	DNSNames []string
	IPs      []netip.Addr
}

func (a Addresses) count() int { return len(a.DNSNames) + len(a.IPs) }

// forbidden are the names and ranges that no node serves under, beside those that never are anybody's own.
type forbidden struct {
	names  []string
	ranges []netip.Prefix
}

// parseForbidden reads DNS names, IPs and CIDRs.
func parseForbidden(list []string) (forbidden, error) {
	var f forbidden
	for _, entry := range list {
		if ip, err := netip.ParseAddr(entry); err == nil {
			ip = ip.Unmap()
			f.ranges = append(f.ranges, netip.PrefixFrom(ip, ip.BitLen()))
		} else if prefix, err := netip.ParsePrefix(entry); err == nil {
			f.ranges = append(f.ranges, prefix.Masked())
		} else if len(validation.IsDNS1123Subdomain(entry)) == 0 {
			f.names = append(f.names, entry)
		} else {
			return forbidden{}, errors.New("is neither a DNS name in lower case, an IP nor a CIDR")
		}
	}
	return f, nil
}

func (f forbidden) name(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	// What the cluster's own DNS answers for, and every machine's own name.
	return slices.Contains(f.names, name) || last == "localhost" || last == "svc" || name == "kubernetes" || strings.HasPrefix(name, "kubernetes.default") ||
		strings.HasSuffix(name, ".localhost.localdomain") || name == "localhost.localdomain" || strings.Contains(name, ".svc.")
}

func (f forbidden) ip(ip netip.Addr) bool {
	return !ip.IsGlobalUnicast() || slices.ContainsFunc(f.ranges, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// serves reports whether a request is for a serving certificate under a signer of the policy.
func (r *Rules) serves(spec certificatesv1.CertificateSigningRequestSpec) bool {
	return slices.Contains(r.policy.ServingSigners, spec.SignerName)
}

// IsServingRequest reports whether a request is for a serving certificate, under a signer of the
// policy. No record names those.
func (r *Rules) IsServingRequest(request *certificatesv1.CertificateSigningRequest) bool {
	return r != nil && r.serves(request.Spec)
}

// leftToOthers reports whether a serving certificate is asked for by a node that is left alone: one that is listed, and has no record.
func (t *trial) leftToOthers() bool {
	name, node := strings.CutPrefix(t.in.Request.Spec.Username, userNode)
	return t.serving && node && slices.Contains(t.rules.policy.UnattestedNodes, name) &&
		!slices.ContainsFunc(t.in.Records, func(r Record) bool { return r.NodeName == name })
}

// SignsServing reports whether this controller signs serving certificates under that signer.
func (r *Rules) SignsServing(signer string) bool {
	return r != nil && slices.Contains(r.policy.SignedServingSigners, signer)
}

// judgeServing judges what a kubelet files for its serving certificate. There is no evidence in it: the node shows its client certificate, which
// was issued on evidence, and its machine has the addresses, by an authority that the node cannot write.
func (t *trial) judgeServing() {
	t.class = Serving
	spec := t.in.Request.Spec
	der, ok := t.soleBlock()
	if !ok {
		return
	}
	t.addresses = t.judgeServingCertification(der)
	judgeUsages(&t.denied, spec.Usages, t.asks.key, certificatesv1.UsageServerAuth)
	if !strings.HasPrefix(spec.Username, userNode) {
		t.deny(ReasonRequesterNotAllowed, "requester: is not a node")
	} else {
		t.judgeNode(spec)
	}
	if t.asks.nodeName == "" {
		return
	}
	t.findServingMachine()
	t.judgeCredential()
	t.judgeAddresses(t.addresses)
}

// judgeServingCertification applies S3, S4, and what takes the place of S5.
func (t *trial) judgeServingCertification(der []byte) Addresses {
	parts, err := openCertification(der)
	if err != nil {
		t.deny(ReasonUnsupportedKey, "certification request: %v", err)
		return Addresses{}
	}
	if t.asks.key, err = parts.checkKey(der); err != nil {
		t.deny(ReasonUnsupportedKey, "certification request: %v", err)
	}
	if t.asks.nodeName, err = nodeNameOf(parts.subject); err != nil {
		t.deny(ReasonSubjectMismatch, "subject: %v", err)
	}
	addresses, err := addressesOf(parts.attributes)
	if err != nil {
		t.deny(ReasonForbiddenExtension, "extensions: %v", err)
	}
	return addresses
}

// findServingMachine finds the record of the node name, and with it the machine.
func (t *trial) findServingMachine() {
	for i := range t.in.Records {
		if r := &t.in.Records[i]; r.NodeName == t.asks.nodeName {
			if t.record != nil {
				t.deny(ReasonIdentityBound, "record: more than one has this node name")
			}
			t.record = r
		}
	}
	if t.record == nil {
		t.wait(ReasonMachineNotFound, "the node has no record: it did not attest yet")
		return
	}
	if t.record.Cluster != t.rules.policy.Cluster {
		t.deny(ReasonIdentityBound, "record: it is another cluster's")
	}
	if t.record.Provider == InsecureProvider || t.rules.rank(t.record.Provider) < 0 {
		t.deny(ReasonProviderMismatch, "the node never showed evidence")
	}
	for i := range t.in.Machines {
		if m := &t.in.Machines[i]; m.Ref == t.record.Machine {
			t.machine = m
		}
	}
	if t.machine == nil {
		t.wait(ReasonMachineNotFound, "the machine in the node's record is not known")
		return
	}
	if !t.machine.Ready {
		t.wait(ReasonMachineNotReady, "the machine is not provisioned yet, or is paused")
	}
	t.judgeDeletion()
	if t.namingOf(t.record, t.machine) == keyReplaced {
		t.deny(ReasonEKReplaced, "record: the source that named the machine's endorsement key names another one now")
	}
	t.judgeNamed(t.record)
}

// judgeAddresses compares what is asked for with what the machine has, and with what others have.
func (t *trial) judgeAddresses(asked Addresses) {
	for _, name := range asked.DNSNames {
		if t.rules.forbidden.name(name) {
			t.deny(ReasonAddressForbidden, "addresses: %.64q is no node's own", name)
		}
	}
	for _, ip := range asked.IPs {
		if t.rules.forbidden.ip(ip) {
			t.deny(ReasonAddressForbidden, "addresses: %s is no node's own", ip)
		}
	}
	if t.machine == nil {
		return
	}
	own := t.machine.Addresses
	strange := func(what string, known int) {
		if known == 0 {
			t.wait(ReasonAddressUnknown, "addresses: nothing says yet which the machine has")
		} else {
			t.deny(ReasonAddressMismatch, "addresses: %.64q is not the machine's", what)
		}
	}
	for _, name := range asked.DNSNames {
		if name != t.record.NodeName && !slices.Contains(own.DNSNames, name) {
			strange(name, len(own.DNSNames))
		}
		if t.othersHave(func(m *Machine) bool {
			return slices.Contains(m.Addresses.DNSNames, name) || slices.Contains(t.names(m), name)
		}) ||
			slices.ContainsFunc(t.in.Records, func(r Record) bool { return r.NodeName == name && r.Machine != t.record.Machine }) {
			t.deny(ReasonAddressMismatch, "addresses: %.64q is another machine's, too", name)
		}
	}
	for _, ip := range asked.IPs {
		if !slices.Contains(own.IPs, ip) {
			strange(ip.String(), len(own.IPs))
		}
		if t.othersHave(func(m *Machine) bool { return slices.Contains(m.Addresses.IPs, ip) }) {
			t.deny(ReasonAddressMismatch, "addresses: %s is another machine's, too", ip)
		}
	}
}

func (t *trial) othersHave(has func(*Machine) bool) bool {
	for i := range t.in.Machines {
		if m := &t.in.Machines[i]; m.Ref != t.machine.Ref && has(m) {
			return true
		}
	}
	return false
}

// addressesOf reads the attributes of a certification request whose only extension is one of alternative names, DNS names and IPs alone.
func addressesOf(attributes []byte) (Addresses, error) {
	errOther := errors.New("there is not one extension, of subject alternative names")
	extensions, err := extensionsOf(attributes)
	if err != nil {
		return Addresses{}, err
	}
	if len(extensions) != 1 || !extensionIs(extensions[0], oidSubjectAltName) {
		return Addresses{}, errOther
	}
	extension, err := elements(extensions[0].Bytes, tagOID, tagOctetString)
	if err != nil {
		return Addresses{}, errors.New("the alternative names are critical, or not a DER extension")
	}
	list, err := elements(extension[1].Bytes, tagSequence)
	if err != nil {
		return Addresses{}, errOther
	}
	names, err := elements(list[0].Bytes)
	if err != nil || len(names) == 0 || len(names) > maxAddresses {
		return Addresses{}, errors.New("there is no alternative name, or there are too many")
	}
	var found Addresses
	for _, name := range names {
		if err := found.add(name); err != nil {
			return Addresses{}, err
		}
	}
	if !bytes.Equal(attributes, requestOfExtension(oidSubjectAltName, list[0].FullBytes)) {
		return Addresses{}, errors.New("the alternative names are not in their one encoding")
	}
	return found, nil
}

// add takes one GeneralName.
func (a *Addresses) add(name asn1.RawValue) error {
	switch name.FullBytes[0] {
	case tagDNSName:
		dns := string(name.Bytes)
		if len(validation.IsDNS1123Subdomain(dns)) > 0 || slices.Contains(a.DNSNames, dns) {
			return errors.New("a DNS name is a wildcard, is not in lower case, or stands twice")
		}
		last := dns[strings.LastIndexByte(dns, '.')+1:]
		if strings.Trim(last, "0123456789") == "" {
			return errors.New("a DNS name looks like an IP")
		}
		a.DNSNames = append(a.DNSNames, dns)
	case tagIPAddress:
		ip, ok := netip.AddrFromSlice(name.Bytes)
		if !ok || ip.Is4In6() || slices.Contains(a.IPs, ip) {
			return errors.New("an IP has not 4 or 16 bytes, is an IPv4 one in 16, or stands twice")
		}
		a.IPs = append(a.IPs, ip)
	default:
		return errors.New("an alternative name is neither a DNS name nor an IP")
	}
	if !bytes.Equal(name.FullBytes, element(name.FullBytes[0], name.Bytes)) {
		return errors.New("an alternative name is not in its one encoding")
	}
	return nil
}
