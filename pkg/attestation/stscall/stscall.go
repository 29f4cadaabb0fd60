// SPDX-License-Identifier: Apache-2.0

// Package stscall describes the one request to the AWS Security Token Service (STS) that provider
// ec2-role signs on the node, and that the controller sends: GetCallerIdentity, with a nonce in a
// signed header. Node and controller build it from the same few values. The node supplies no URL,
// no header and no body, so it cannot change what is sent or to whom.
package stscall

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/form"
)

const (
	// Service is the service in the scope of the signature.
	Service = "sts"
	// Body is the whole body. STS takes the parameters of a call from a form.
	Body = "Action=GetCallerIdentity&Version=2011-06-15"
	// BodySHA256 is the SHA-256 of Body, in lower-case hex.
	BodySHA256 = "ab821ae955788b0e33ebd34c208442ccfc2d406e2edc5e7a39bd6458fbb4f843"
	// ContentType is the type of Body.
	ContentType = "application/x-www-form-urlencoded; charset=utf-8"
	// NonceHeader has the nonce: 64 characters of lower-case hex.
	NonceHeader = "X-Kubelet-Authenticator-Nonce"
	// DateHeader has the date of the signature.
	DateHeader = "X-Amz-Date"
	// TokenHeader has the session token.
	TokenHeader = "X-Amz-Security-Token" //nolint:gosec // G101: a name
	// DateFormat is the one of DateHeader, in UTC.
	DateFormat = "20060102T150405Z"
	// SignedHeaders are all headers of the request, in the order of the canonical request.
	SignedHeaders = "content-length;content-type;host;x-amz-date;x-amz-security-token;x-kubelet-authenticator-nonce"
)

// maxToken bounds the session token. AWS promises no limit. The tokens that are known have less
// than 2 KiB.
const maxToken = 8 << 10

// The forms of what a node sends. An access key ID of temporary credentials begins with ASIA (IAM
// User Guide, "IAM identifiers"). Session tokens are base64.
var (
	keyForm       = form.New(`^ASIA[A-Z0-9]{12,60}$`)
	tokenForm     = form.New(`^[A-Za-z0-9+/]+={0,2}$`)
	signatureForm = form.New(`^[0-9a-f]{64}$`)
)

// Statement is what a node signed, without what the controller knows. It is not a secret: every
// node can read it. The session token is worth nothing without the secret key, which never leaves
// the node. The signature is good for this one request.
type Statement struct {
	// Region is the region of the instance.
	Region string `json:"region"`
	// Date is when the node signed, in DateFormat.
	Date string `json:"date"`
	// AccessKeyID and SecurityToken are of the instance's temporary credentials.
	AccessKeyID   string `json:"accessKeyID"`
	SecurityToken string `json:"securityToken"`
	// Signature is that of Signature Version 4, in lower-case hex.
	Signature string `json:"signature"`
}

// Marshal returns the one encoding of s. It fails if s could not be parsed again.
func (s Statement) Marshal() ([]byte, error) {
	_, dateErr := s.Time()
	_, regionErr := PartitionOf(s.Region)
	switch {
	case regionErr != nil:
		return nil, regionErr
	case dateErr != nil:
		return nil, dateErr
	case !keyForm.Get().MatchString(s.AccessKeyID):
		return nil, errors.New("accessKeyID: not of temporary credentials")
	case len(s.SecurityToken) > maxToken || !tokenForm.Get().MatchString(s.SecurityToken):
		return nil, fmt.Errorf("securityToken: must be base64 of at most %d characters", maxToken)
	case !signatureForm.Get().MatchString(s.Signature):
		return nil, errors.New("signature: must have 64 characters of lower-case hex")
	}
	return json.Marshal(s)
}

// Parse accepts exactly the bytes that Marshal writes. The caller bounds data, as
// attestation.Identity does.
func Parse(data []byte) (*Statement, error) {
	s := &Statement{}
	if err := json.Unmarshal(data, s); err != nil {
		return nil, errors.New("not the JSON of a signed request to STS")
	}
	canonical, err := s.Marshal()
	if err != nil {
		return nil, err
	}
	// encoding/json accepts doubled keys, other cases and white space. The comparison does not.
	if !bytes.Equal(canonical, data) {
		return nil, errors.New("not in canonical form")
	}
	return s, nil
}

// Time returns the time of Date.
func (s Statement) Time() (time.Time, error) {
	signed, err := time.Parse(DateFormat, s.Date)
	if err != nil || signed.Format(DateFormat) != s.Date { // time.Parse also accepts fractions
		return time.Time{}, errors.New("date: must be like 20060102T150405Z")
	}
	return signed, nil
}

// Header returns the headers of the request, without Host and Content-Length: net/http writes both
// from URL and body.
func (s Statement) Header(nonce string) http.Header {
	header := Unsigned(nonce)
	header.Set(DateHeader, s.Date)
	header.Set(TokenHeader, s.SecurityToken)
	header.Set("Authorization", s.authorization()+s.Signature)
	return header
}

// Unsigned returns the headers that a signer does not add.
func Unsigned(nonce string) http.Header {
	return http.Header{"Content-Type": {ContentType}, NonceHeader: {nonce}}
}

// SetSignature takes the signature from the header Authorization that a signer made. It fails if
// the header differs from the one that the controller will send.
func (s *Statement) SetSignature(authorization string) error {
	signature, ok := strings.CutPrefix(authorization, s.authorization())
	if !ok {
		return errors.New("the signature has another form than the controller expects")
	}
	s.Signature = signature
	return nil
}

// authorization returns the header Authorization without the signature.
func (s Statement) authorization() string {
	day, _, _ := strings.Cut(s.Date, "T")
	return "AWS4-HMAC-SHA256 Credential=" + s.AccessKeyID + "/" + day + "/" + s.Region + "/" + Service + "/aws4_request, SignedHeaders=" + SignedHeaders + ", Signature="
}

// Partition is a part of AWS with accounts of its own.
type Partition struct {
	// Name is the one in ARNs.
	Name string
	// suffix is the domain of its services.
	suffix string
	region form.Form
}

// partitions are those of AWS's public documentation. A region's name has the form of its
// partition, so a new region needs no new release. The forms exclude each other.
var partitions = []Partition{
	{"aws", "amazonaws.com", form.New(`^(af|ap|ca|eu|il|me|mx|sa|us)-(central|north|south|(north|south)?(east|west))-[1-9][0-9]?$`)},
	{"aws-cn", "amazonaws.com.cn", form.New(`^cn-(north|northwest)-[1-9][0-9]?$`)},
	{"aws-us-gov", "amazonaws.com", form.New(`^us-gov-(east|west)-[1-9][0-9]?$`)},
}

// PartitionOf returns the partition of a region.
func PartitionOf(region string) (*Partition, error) {
	for i := range partitions {
		if partitions[i].region.Get().MatchString(region) {
			return &partitions[i], nil
		}
	}
	return nil, fmt.Errorf("region: %.32q is not the name of a region in a partition that is known", region)
}

// URL returns where STS answers for a region of the partition.
func (p *Partition) URL(region string) string { return p.ServiceURL("sts", region) }

// ServiceURL returns where a service, such as ec2, answers for a region of the partition.
func (p *Partition) ServiceURL(service, region string) string {
	return "https://" + service + "." + region + "." + p.suffix + "/"
}
