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
func (e *evaluation) leftToOtherApprovers() bool {
	name, node := strings.CutPrefix(e.in.Request.Spec.Username, userNode)
	return e.serving && node && e.rules.IsUnattestedNode(name) &&
		!slices.ContainsFunc(e.in.Records, func(r Record) bool { return r.NodeName == name })
}

// SignsServing reports whether this controller signs serving certificates under that signer.
func (r *Rules) SignsServing(signer string) bool {
	return r != nil && slices.Contains(r.policy.SignedServingSigners, signer)
}

// judgeServing judges a kubelet's request for a serving certificate. Such a request has no
// evidence. The node authenticates with its client certificate, which was issued on evidence. An
// authority that the node cannot write must assign the addresses to its machine.
func (e *evaluation) judgeServing() {
	e.class = Serving
	spec := e.in.Request.Spec
	der, ok := e.soleBlock()
	if !ok {
		return
	}
	e.addresses = e.judgeServingPKCS10(der)
	judgeUsages(&e.denied, spec.Usages, e.requested.key, certificatesv1.UsageServerAuth)
	if !strings.HasPrefix(spec.Username, userNode) {
		e.deny(ReasonRequesterNotAllowed, "requester: is not a node")
	} else {
		e.judgeNode(spec)
	}
	if e.requested.nodeName == "" {
		return
	}
	e.findServingMachine()
	e.judgeSuspension()
	e.judgeCredential()
	e.judgeAddresses(e.addresses)
}

// judgeServingPKCS10 applies S3 and S4, and checks alternative names in place of S5.
func (e *evaluation) judgeServingPKCS10(der []byte) Addresses {
	parts, err := splitPKCS10(der)
	if err != nil {
		e.deny(ReasonUnsupportedKey, "certification request: %v", err)
		return Addresses{}
	}
	if e.requested.key, err = parts.checkKey(der); err != nil {
		e.deny(ReasonUnsupportedKey, "certification request: %v", err)
	}
	if e.requested.nodeName, err = nodeNameOf(parts.subject); err != nil {
		e.deny(ReasonSubjectMismatch, "subject: %v", err)
	}
	addresses, err := addressesOf(parts.attributes)
	if err != nil {
		e.deny(ReasonForbiddenExtension, "extensions: %v", err)
	}
	return addresses
}

// findServingMachine finds the record of the node name, and the machine in that record.
func (e *evaluation) findServingMachine() {
	for i := range e.in.Records {
		if r := &e.in.Records[i]; r.NodeName == e.requested.nodeName {
			if e.record != nil {
				e.deny(ReasonIdentityBound, "record: more than one has this node name")
			}
			e.record = r
		}
	}
	if e.record == nil {
		e.wait(ReasonMachineNotFound, "the node has no record: it did not attest yet")
		return
	}
	if e.record.Cluster != e.rules.policy.Cluster {
		e.deny(ReasonIdentityBound, "record: it is another cluster's")
	}
	if e.record.Provider == InsecureProvider || e.rules.rank(e.record.Provider) < 0 {
		e.deny(ReasonProviderMismatch, "the node never showed evidence")
	}
	for i := range e.in.Machines {
		if m := &e.in.Machines[i]; m.Ref == e.record.Machine {
			e.machine = m
		}
	}
	if e.machine == nil {
		e.wait(ReasonMachineNotFound, "the machine in the node's record is not known")
		return
	}
	if !e.machine.Ready {
		e.wait(ReasonMachineNotReady, "the machine is not provisioned yet, or is paused")
	}
	e.judgeDeletion()
	if e.ekStateOf(e.record, e.machine) == ekStateReplaced {
		e.deny(ReasonEKReplaced, "record: a source names another endorsement key for the machine now")
	}
	e.warnIfNotNamed(e.record)
}

// judgeAddresses compares the requested addresses with those of the machine, and of other machines.
func (e *evaluation) judgeAddresses(asked Addresses) {
	for _, name := range asked.DNSNames {
		if e.rules.forbidden.hasName(name) {
			e.deny(ReasonAddressForbidden, "addresses: %.64q is no node's own", name)
		}
	}
	for _, ip := range asked.IPs {
		if e.rules.forbidden.hasIP(ip) {
			e.deny(ReasonAddressForbidden, "addresses: %s is no node's own", ip)
		}
	}
	if e.machine == nil {
		return
	}
	own := e.machine.Addresses
	refuseForeign := func(what string, known int) {
		if known == 0 {
			e.wait(ReasonAddressUnknown, "addresses: nothing says yet which the machine has")
		} else {
			e.deny(ReasonAddressMismatch, "addresses: %.64q is not the machine's", what)
		}
	}
	for _, name := range asked.DNSNames {
		if name != e.record.NodeName && !slices.Contains(own.DNSNames, name) {
			refuseForeign(name, len(own.DNSNames))
		}
		if e.otherMachineHas(func(m *Machine) bool {
			return slices.Contains(m.Addresses.DNSNames, name) || slices.Contains(e.nodeNames(m), name)
		}) ||
			slices.ContainsFunc(e.in.Records, func(r Record) bool { return r.NodeName == name && r.Machine != e.record.Machine }) {
			e.deny(ReasonAddressMismatch, "addresses: %.64q is another machine's, too", name)
		}
	}
	for _, ip := range asked.IPs {
		if !slices.Contains(own.IPs, ip) {
			refuseForeign(ip.String(), len(own.IPs))
		}
		if e.otherMachineHas(func(m *Machine) bool { return slices.Contains(m.Addresses.IPs, ip) }) {
			e.deny(ReasonAddressMismatch, "addresses: %s is another machine's, too", ip)
		}
	}
}

func (e *evaluation) otherMachineHas(has func(*Machine) bool) bool {
	for i := range e.in.Machines {
		if m := &e.in.Machines[i]; m.Ref != e.machine.Ref && has(m) {
			return true
		}
	}
	return false
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
