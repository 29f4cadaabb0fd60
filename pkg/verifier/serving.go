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

// forbiddenAddresses are the configured names and ranges that no serving certificate may have. Some
// others are always forbidden.
type forbiddenAddresses struct {
	names  []string
	ranges []netip.Prefix
}

// parseForbiddenAddresses reads DNS names, IPs and CIDRs.
func parseForbiddenAddresses(list []string) (forbiddenAddresses, error) {
	var f forbiddenAddresses
	for _, entry := range list {
		if ip, err := netip.ParseAddr(entry); err == nil {
			ip = ip.Unmap()
			f.ranges = append(f.ranges, netip.PrefixFrom(ip, ip.BitLen()))
		} else if prefix, err := netip.ParsePrefix(entry); err == nil {
			f.ranges = append(f.ranges, prefix.Masked())
		} else if len(validation.IsDNS1123Subdomain(entry)) == 0 {
			f.names = append(f.names, entry)
		} else {
			return forbiddenAddresses{}, errors.New("is neither a DNS name in lower case, an IP nor a CIDR")
		}
	}
	return f, nil
}

func (f forbiddenAddresses) hasName(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	// Names that the cluster's own DNS resolves, and names of the local machine.
	return slices.Contains(f.names, name) || last == "localhost" || last == "svc" || name == "kubernetes" || strings.HasPrefix(name, "kubernetes.default") ||
		strings.HasSuffix(name, ".localhost.localdomain") || name == "localhost.localdomain" || strings.Contains(name, ".svc.")
}

func (f forbiddenAddresses) hasIP(ip netip.Addr) bool {
	return !ip.IsGlobalUnicast() || slices.ContainsFunc(f.ranges, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// isForServing reports whether a request is for a serving certificate under a signer of the policy.
func (r *Rules) isForServing(spec certificatesv1.CertificateSigningRequestSpec) bool {
	return slices.Contains(r.policy.ServingSigners, spec.SignerName)
}

// IsServingRequest reports whether a request is for a serving certificate under a signer of the
// policy. No record is written for such a request.
func (r *Rules) IsServingRequest(request *certificatesv1.CertificateSigningRequest) bool {
	return r != nil && r.isForServing(request.Spec)
}

// leftToOtherApprovers reports whether an unattested node without a record requests a serving
// certificate.
func (r *Rules) leftToOtherApprovers(in Input, k kind) bool {
	name, node := strings.CutPrefix(in.Request.Spec.Username, userNode)
	return k.serving && node && r.IsUnattestedNode(name) &&
		!slices.ContainsFunc(in.Records, func(record Record) bool { return record.NodeName == name && !record.Orphaned })
}

// SignsServing reports whether this controller signs serving certificates under that signer.
func (r *Rules) SignsServing(signer string) bool {
	return r != nil && slices.Contains(r.policy.SignedServingSigners, signer)
}

// evaluateServing applies the rules for a kubelet's request for a serving certificate. Such a
// request has no evidence. The node authenticates with its client certificate, which was issued on
// evidence. An authority that the node cannot write must assign the addresses to its machine.
func (r *Rules) evaluateServing(in Input, q request) evaluation {
	s := subject{class: Serving}
	if !q.readable {
		return evaluation{subject: s}
	}
	var f findings
	if !strings.HasPrefix(q.object.Spec.Username, userNode) {
		f.deny(ReasonRequesterNotAllowed, "requester: is not a node")
	} else {
		f.add(checkNode(q)) // I2
	}
	if q.cert.nodeName == "" {
		return evaluation{subject: s, findings: f}
	}
	var refused findings
	s.machine, s.record, refused = r.findServingMachine(in, q.cert.nodeName)
	f.add(refused)
	f.add(r.checkSuspension(in, q, s))       // T2
	_, refused = r.checkCredential(in, q, s) // I4
	f.add(refused)
	f.add(r.checkForbidden(q.cert.addresses))
	if s.machine != nil {
		f.add(r.checkAddresses(in, q.cert.addresses, s.machine, s.record))
	}
	return evaluation{subject: s, findings: f}
}

// findServingMachine finds the record of the node name, and the machine in that record. It applies
// M2 and M3 to them.
func (r *Rules) findServingMachine(in Input, name string) (machine *Machine, record *Record, f findings) {
	for i := range in.Records {
		if found := &in.Records[i]; found.NodeName == name {
			if record != nil {
				f.deny(ReasonIdentityBound, "record: more than one has this node name")
			}
			record = found
		}
	}
	if record == nil {
		f.wait(ReasonMachineNotFound, "the node has no record: it did not attest yet")
		return nil, nil, f
	}
	if record.Cluster != r.policy.Cluster {
		f.deny(ReasonIdentityBound, "record: it is another cluster's")
	}
	if record.Provider == InsecureProvider || r.rank(record.Provider) < 0 {
		f.deny(ReasonProviderMismatch, "the node never showed evidence")
	}
	for i := range in.Machines {
		if m := &in.Machines[i]; m.Ref == record.Machine {
			machine = m
		}
	}
	if machine == nil {
		f.wait(ReasonMachineNotFound, "the machine in the node's record is not known")
		return nil, record, f
	}
	f.add(checkReady(machine))
	f.add(checkDeletion(machine, Serving, in.Now))
	if r.ekStateOf(record, machine) == ekStateReplaced {
		f.deny(ReasonEKReplaced, "record: a source names another endorsement key for the machine now")
	}
	f.add(r.warnIfNotNamed(record, machine))
	return machine, record, f
}

// checkForbidden refuses reserved names and addresses.
func (r *Rules) checkForbidden(requested Addresses) (f findings) {
	for _, name := range requested.DNSNames {
		if r.forbidden.hasName(name) {
			f.deny(ReasonAddressForbidden, "addresses: %.64q is a reserved name, not the node's", name)
		}
	}
	for _, ip := range requested.IPs {
		if r.forbidden.hasIP(ip) {
			f.deny(ReasonAddressForbidden, "addresses: %s is a reserved address, not the node's", ip)
		}
	}
	return f
}

// checkAddresses compares the requested addresses with those of the machine, and of other machines.
func (r *Rules) checkAddresses(in Input, requested Addresses, machine *Machine, record *Record) (f findings) {
	own := machine.Addresses
	refuseForeign := func(what string, known int) {
		if known == 0 {
			f.wait(ReasonAddressUnknown, "addresses: nothing says yet which the machine has")
		} else {
			f.deny(ReasonAddressMismatch, "addresses: %.64q is not the machine's", what)
		}
	}
	otherMachineHas := func(has func(*Machine) bool) bool {
		for i := range in.Machines {
			if m := &in.Machines[i]; m.Ref != machine.Ref && has(m) {
				return true
			}
		}
		return false
	}
	for _, name := range requested.DNSNames {
		if name != record.NodeName && !slices.Contains(own.DNSNames, name) {
			refuseForeign(name, len(own.DNSNames))
		}
		if otherMachineHas(func(m *Machine) bool {
			return slices.Contains(m.Addresses.DNSNames, name) || slices.Contains(r.nodeNames(m), name)
		}) ||
			slices.ContainsFunc(in.Records, func(other Record) bool { return other.NodeName == name && other.Machine != record.Machine }) {
			f.deny(ReasonAddressMismatch, "addresses: %.64q is another machine's, too", name)
		}
	}
	for _, ip := range requested.IPs {
		if !slices.Contains(own.IPs, ip) {
			refuseForeign(ip.String(), len(own.IPs))
		}
		if otherMachineHas(func(m *Machine) bool { return slices.Contains(m.Addresses.IPs, ip) }) {
			f.deny(ReasonAddressMismatch, "addresses: %s is another machine's, too", ip)
		}
	}
	return f
}

// addressesOf reads the attributes of a PKCS#10 request. They must have exactly one extension, of
// alternative names that are DNS names and IPs.
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
	var addresses Addresses
	for _, name := range names {
		if err := addresses.add(name); err != nil {
			return Addresses{}, err
		}
	}
	if !bytes.Equal(attributes, requestOfExtension(oidSubjectAltName, list[0].FullBytes)) {
		return Addresses{}, errors.New("the alternative names are not in their one encoding")
	}
	return addresses, nil
}

// add adds one GeneralName.
func (a *Addresses) add(name asn1.RawValue) error {
	switch name.FullBytes[0] {
	case tagDNSName:
		dns := string(name.Bytes)
		if len(validation.IsDNS1123Subdomain(dns)) > 0 || slices.Contains(a.DNSNames, dns) {
			return errors.New("a DNS name is a wildcard, is not in lower case, or is listed twice")
		}
		last := dns[strings.LastIndexByte(dns, '.')+1:]
		if strings.Trim(last, "0123456789") == "" {
			return errors.New("a DNS name looks like an IP")
		}
		a.DNSNames = append(a.DNSNames, dns)
	case tagIPAddress:
		ip, ok := netip.AddrFromSlice(name.Bytes)
		if !ok || ip.Is4In6() || slices.Contains(a.IPs, ip) {
			return errors.New("an IP has not 4 or 16 bytes, is an IPv4 one in 16, or is listed twice")
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
