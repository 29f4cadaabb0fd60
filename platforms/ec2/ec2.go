// SPDX-License-Identifier: Apache-2.0

// Package ec2 asks Amazon EC2 for the endorsement keys of its instances' NitroTPMs. It is an
// example: it was tested against an imitation of EC2, and never on EC2.
//
// docs/platforms/ec2.md has the rights and the settings that it needs.
package ec2

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/xml"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/platforms/internal/facts"
)

const (
	// maxFilter is how many values a filter has. EC2 allows 200 ("DescribeInstances" in the EC2 API
	// Reference).
	maxFilter = 200
	// maxPages bounds the answers about one filter. There is usually one.
	maxPages = 20
	// findConcurrency is how many calls look for the instances of a Cluster at a time.
	findConcurrency = 4
)

// platform is EC2 in one region of one account.
type platform struct {
	api    *api
	region string
	// hadTPM has the instances that had a NitroTPM in an earlier answer.
	hadTPM facts.Facts[bool]
}

// New returns EC2 in one region, for the account of the credentials.
func New(c Config, options platformkit.Options, budget *platformkit.Budget) (clusterapi.EKTrust, error) {
	api, err := newAPI(c, budget)
	if err != nil {
		return nil, err
	}
	return platformkit.New(&platform{api: api, region: c.Region}, options), nil
}

// instance has the fields of an instance in an answer to DescribeInstances that are used.
type instance struct {
	ID         string `xml:"instanceId"`
	State      string `xml:"instanceState>name"`
	Zone       string `xml:"placement>availabilityZone"`
	LaunchTime string `xml:"launchTime"`
	TPMSupport string `xml:"tpmSupport"`
}

// Location returns <zone>/<instance ID>.
func (p *platform) Location(m clusterapi.PlatformMachine) (string, error) {
	region, _, ok := cloudname.ParseEC2ProviderID(m.ProviderID)
	switch {
	case !ok:
		return "", fmt.Errorf("the provider ID %.128q does not have the form aws:///<zone>/<instance ID>", m.ProviderID)
	case region != p.region:
		return "", fmt.Errorf("the provider ID is of the region %s, and this controller asks in %s alone", region, p.region)
	}
	return strings.TrimPrefix(m.ProviderID, "aws:///"), nil
}

// Find asks for up to 200 instances in one call. It filters by instance IDs: a call that lists them
// as InstanceId fails if one of them does not exist.
func (p *platform) Find(ctx context.Context, _ types.NamespacedName, locations []string) ([]platformkit.Instance, error) {
	var mu sync.Mutex
	var all []platformkit.Instance
	var calls errgroup.Group
	calls.SetLimit(findConcurrency)
	for batch := range slices.Chunk(locations, maxFilter) {
		calls.Go(func() error {
			found, err := p.describe(ctx, batch)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, found...)
			return err
		})
	}
	err := calls.Wait()
	return all, err
}

// describe returns the instances at up to 200 locations.
func (p *platform) describe(ctx context.Context, locations []string) (found []platformkit.Instance, err error) {
	parameters := url.Values{"MaxResults": {"1000"}, "Filter.1.Name": {"instance-id"}}
	byID := map[string][]string{}
	for _, location := range locations {
		_, id, _ := strings.Cut(location, "/")
		if byID[id] == nil {
			parameters.Set("Filter.1.Value."+strconv.Itoa(len(byID)+1), id)
		}
		byID[id] = append(byID[id], location)
	}
	for range maxPages {
		var page struct {
			XMLName      xml.Name `xml:"DescribeInstancesResponse"`
			Reservations []struct {
				Instances []instance `xml:"instancesSet>item"`
			} `xml:"reservationSet>item"`
			NextToken string `xml:"nextToken"`
		}
		if err := p.api.call(ctx, "DescribeInstances", parameters, &page); err != nil {
			return found, err
		}
		for _, reservation := range page.Reservations {
			for _, i := range reservation.Instances {
				if byID[i.ID] == nil {
					return found, fmt.Errorf("DescribeInstances: the answer has the instance %.32q, which was not asked for", i.ID)
				}
				for _, location := range byID[i.ID] {
					if at, exists := i.at(location); exists {
						found = append(found, at)
					}
				}
			}
		}
		if page.NextToken == "" {
			return found, nil
		}
		parameters.Set("NextToken", page.NextToken)
	}
	return found, fmt.Errorf("DescribeInstances: more than %d pages about %d instances", maxPages, len(byID))
}

// at returns the instance for the machines at a location. It is false if the instance is gone: EC2
// lists terminated ones for about an hour.
func (i instance) at(location string) (at platformkit.Instance, exists bool) {
	// The NitroTPM may be another one after a start.
	at = platformkit.Instance{Location: location, ID: i.ID, Version: i.LaunchTime + " " + i.TPMSupport, Data: i}
	switch i.State {
	case "pending", "running", "stopping", "stopped":
	case "shutting-down", "terminated":
		return platformkit.Instance{}, false
	default:
		at.Refused = fmt.Errorf("the instance has the state %.32q, which is not known", i.State)
	}
	if zone, _, _ := strings.Cut(location, "/"); zone != i.Zone {
		at.Refused = fmt.Errorf("the instance is in the zone %.64q, and not in that of the provider ID", i.Zone)
	}
	return at, true
}

// keyTypes are all kinds of endorsement keys that EC2 names.
var keyTypes = []struct {
	name string
	is   func(key any) bool
}{
	{"rsa-2048", func(key any) bool {
		k, ok := key.(*rsa.PublicKey)
		return ok && k.N.BitLen() == 2048
	}},
	{"ecc-sec-p384", func(key any) bool {
		k, ok := key.(*ecdsa.PublicKey)
		return ok && k.Curve == elliptic.P384()
	}},
}

// EndorsementKeys reads both keys. A node may show either, so one alone is no answer.
func (p *platform) EndorsementKeys(ctx context.Context, found platformkit.Instance) ([]tpm.Fingerprint, error) {
	i := found.Data.(instance)
	switch {
	case i.TPMSupport == "v2.0":
		p.hadTPM.Set(i.ID, true)
	case i.TPMSupport != "":
		return nil, fmt.Errorf("the instance has tpmSupport %.32q, and only v2.0 is known", i.TPMSupport)
	case p.hadTPM.Get(i.ID):
		return nil, errors.New("the instance had a NitroTPM, and the answer has none")
	case i.State != "running":
		return nil, fmt.Errorf("the instance is %s, and the answer has no tpmSupport", i.State)
	default:
		return []tpm.Fingerprint{}, nil // it was launched without NitroTPM
	}
	var eks []tpm.Fingerprint
	for _, kind := range keyTypes {
		var answer struct {
			XMLName    xml.Name `xml:"GetInstanceTpmEkPubResponse"`
			InstanceID string   `xml:"instanceId"`
			KeyFormat  string   `xml:"keyFormat"`
			KeyType    string   `xml:"keyType"`
			KeyValue   string   `xml:"keyValue"`
		}
		const action, format = "GetInstanceTpmEkPub", "der"
		if err := p.api.call(ctx, action, url.Values{"InstanceId": {i.ID}, "KeyFormat": {format}, "KeyType": {kind.name}}, &answer); err != nil {
			return nil, err
		}
		if answer.InstanceID != i.ID || answer.KeyFormat != format || answer.KeyType != kind.name {
			return nil, fmt.Errorf("%s: the answer is about another key than the one that was asked for", action)
		}
		der, err := base64.StdEncoding.Strict().DecodeString(strings.Join(strings.Fields(answer.KeyValue), ""))
		if err != nil {
			return nil, fmt.Errorf("%s: the key is not in base64", action)
		}
		key, err := x509.ParsePKIXPublicKey(der)
		if err != nil || !kind.is(key) {
			return nil, fmt.Errorf("%s: the answer is not a public key of type %s in DER", action, kind.name)
		}
		ek, err := clusterapi.EKFingerprint(key)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", action, err)
		}
		eks = append(eks, ek)
	}
	return eks, nil
}
