// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"strings"
)

const (
	blockCertificate = "CERTIFICATE"
	blockOrigin      = "KUBELET AUTHENTICATOR ORIGIN"
)

// Pair is a client certificate with its key, and the cluster it came from.
type Pair struct {
	// Chain is the certificate in PEM, leaf first, then its intermediates.
	Chain []byte
	// Key is the private key in PEM. It is never logged.
	Key []byte
	// Leaf is the parsed first certificate of Chain; its public key is Key's.
	Leaf *x509.Certificate
	// Origin is the cluster that issued it. It is nil if the file does not name it. Then it may be
	// any cluster.
	Origin *Origin
	// Exposed is set when others than the owner could read the file.
	Exposed bool
}

// Origin is the cluster a certificate came from.
type Origin struct {
	// Server is the API server's URL.
	Server string `json:"server"`
	// TLSServerName is the name that the server's certificate is checked for, if not the one in
	// Server.
	TLSServerName string `json:"tlsServerName,omitempty"`
	// CertificateAuthorityData is the PEM bundle that the server's certificate is checked with.
	// Empty means the roots of the system.
	CertificateAuthorityData []byte `json:"certificateAuthorityData,omitempty"`
	// ProxyURL is the proxy to reach it through, if not the environment's. It may hold a
	// password.
	ProxyURL string `json:"proxyURL,omitempty"`
}

// SameCluster reports whether two descriptions can be of one cluster. If both name CAs, they must
// share a CA certificate. The other CAs and the server's address may differ: a CA bundle changes
// during a rotation, and an API server may get another address. If one of them names no CA, the
// servers must be equal.
func (o Origin) SameCluster(other Origin) bool {
	ours, theirs := caSet(o.CertificateAuthorityData), caSet(other.CertificateAuthorityData)
	if len(ours) == 0 || len(theirs) == 0 {
		return strings.TrimSuffix(o.Server, "/") == strings.TrimSuffix(other.Server, "/")
	}
	for der := range ours {
		if theirs[der] {
			return true
		}
	}
	return false
}

// caSet returns the DER certificates of a PEM bundle.
func caSet(bundle []byte) map[string]bool {
	set := map[string]bool{}
	for block, rest := pem.Decode(bundle); block != nil; block, rest = pem.Decode(rest) {
		if block.Type == blockCertificate {
			set[string(block.Bytes)] = true
		}
	}
	return set
}

// NodeName returns the node that the certificate is for.
func (p *Pair) NodeName() string { return NodeName(p.Leaf) }

// NodeName returns the node that a certificate is for: what follows "system:node:" in the common
// name. It is empty if the certificate is not a node's.
func NodeName(leaf *x509.Certificate) string {
	name, ok := strings.CutPrefix(leaf.Subject.CommonName, nodePrefix)
	if !ok {
		return ""
	}
	return name
}

// Fingerprint returns the SHA-256 of the leaf in lower-case hex, as the API server has it in a
// user's credential-id.
func (p *Pair) Fingerprint() string {
	sum := sha256.Sum256(p.Leaf.Raw)
	return hex.EncodeToString(sum[:])
}

// ParsePair reads what Marshal writes, and any PEM file with a certificate chain and its key, in
// any order. It ignores blocks of other types. The error names the missing part and quotes nothing.
func ParsePair(data []byte) (*Pair, error) {
	p := &Pair{}
	var chain, key bytes.Buffer
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		var err error
		switch {
		case block.Type == blockCertificate:
			err = pem.Encode(&chain, &pem.Block{Type: block.Type, Bytes: block.Bytes})
		case block.Type == blockOrigin:
			var origin Origin
			// An origin that cannot be read is ignored: the certificate is good without
			// it.
			if json.Unmarshal(block.Bytes, &origin) == nil && origin.Server != "" {
				p.Origin = &origin
			}
		case strings.HasSuffix(block.Type, "PRIVATE KEY"):
			if key.Len() > 0 {
				return nil, errors.New("it holds more than one private key")
			}
			err = pem.Encode(&key, &pem.Block{Type: block.Type, Bytes: block.Bytes})
		}
		if err != nil {
			return nil, errors.New("it holds a PEM block that cannot be written again")
		}
	}
	p.Chain, p.Key = chain.Bytes(), key.Bytes()
	switch {
	case len(p.Chain) == 0:
		return nil, errors.New("it holds no certificate")
	case len(p.Key) == 0:
		return nil, errors.New("it holds no private key")
	}
	parsed, err := tls.X509KeyPair(p.Chain, p.Key)
	if err != nil {
		// The cause may quote what it could not parse.
		return nil, errors.New("its certificate and key do not parse, or do not belong together")
	}
	if p.Leaf = parsed.Leaf; p.Leaf == nil { // with GODEBUG=x509keypairleaf=0
		if p.Leaf, err = x509.ParseCertificate(parsed.Certificate[0]); err != nil {
			return nil, errors.New("its certificate does not parse")
		}
	}
	return p, nil
}

// Marshal returns the file's content: chain, key, origin. client-go's certificate.FileStore can
// read this order.
func (p *Pair) Marshal() ([]byte, error) {
	var out bytes.Buffer
	out.Write(p.Chain)
	out.Write(p.Key)
	if p.Origin != nil {
		data, err := json.Marshal(p.Origin)
		if err != nil {
			return nil, err
		}
		if err := pem.Encode(&out, &pem.Block{Type: blockOrigin, Bytes: data}); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), nil
}

// Current returns the certificate in the directory. It opens one file and takes no lock. The error
// is fs.ErrNotExist if there is none. MustBeSetAside returns true for it if the file must be set
// aside.
func (d Dir) Current() (*Pair, error) {
	data, exposed, err := d.Read(CurrentFile)
	if err != nil {
		return nil, err
	}
	p, err := ParsePair(data)
	if err != nil {
		return nil, &damagedFileError{d.File(CurrentFile), err.Error()}
	}
	p.Exposed = exposed
	return p, nil
}

// Install replaces the current certificate. The caller holds the lock and has checked the pair.
func (l *Lock) Install(p *Pair) error {
	data, err := p.Marshal()
	if err != nil {
		return err
	}
	return l.dir.Write(CurrentFile, data)
}
