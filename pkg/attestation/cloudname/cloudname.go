// SPDX-License-Identifier: Apache-2.0

// Package cloudname has the forms of the names that AWS and Azure give to instances and accounts.
// Node, controller and inventory must agree on them: a machine with a name that only one of them
// accepts could never get a certificate.
package cloudname

import (
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/form"
)

const (
	region = `[a-z]{2,4}(?:-[a-z]+){1,3}-[0-9]{1,2}`
	// zoneSuffix is what follows the region in the name of a zone: the letter of an availability
	// zone, or the name of a Local Zone (-lax-1a) or a Wavelength Zone (-wl1-bos-wlz-1). No region
	// and suffix together read as another region and suffix.
	zoneSuffix = `(?:[a-z]|(?:-[a-z0-9]{1,8}){1,4}-[0-9]{1,2}[a-z]?)`
	// maxZone bounds the name of a zone, in bytes. The longest that are known have 23.
	maxZone = 64
)

var (
	ec2InstanceForm = form.New(`^i-([0-9a-f]{8}|[0-9a-f]{17})$`)
	ec2RegionForm   = form.New(`^` + region + `$`)
	ec2ZoneForm     = form.New(`^(` + region + `)` + zoneSuffix + `$`)
	awsAccountForm  = form.New(`^[0-9]{12}$`)
	guidForm        = form.New(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

// IsEC2Instance reports whether id has the form of an instance ID: i- and 17 hex digits, or 8 for
// an instance that was launched before 2016.
func IsEC2Instance(id string) bool { return ec2InstanceForm.Get().MatchString(id) }

// IsEC2Region reports whether name has the form of a region: eu-west-1. There need not be such a
// region.
func IsEC2Region(name string) bool { return ec2RegionForm.Get().MatchString(name) }

// IsAWSAccount reports whether id has the form of an account ID: 12 digits.
func IsAWSAccount(id string) bool { return awsAccountForm.Get().MatchString(id) }

// IsGUID reports whether id is a GUID in lower case (RFC 9562, section 4). Azure's subscriptions,
// tenants, clients and VMs have such IDs.
func IsGUID(id string) bool { return guidForm.Get().MatchString(id) }

const ec2Prefix = "aws:///"

// EC2ProviderID returns aws:///<zone>/<instance ID>, the spec.providerID that AWS's cloud provider
// sets. It is empty if zone or instance is malformed.
func EC2ProviderID(zone, instance string) string {
	providerID := ec2Prefix + zone + "/" + instance
	if _, _, ok := ParseEC2ProviderID(providerID); !ok {
		return ""
	}
	return providerID
}

// ParseEC2ProviderID returns the region and the instance ID of what EC2ProviderID returns.
func ParseEC2ProviderID(providerID string) (region, instance string, ok bool) {
	path, isAWS := strings.CutPrefix(providerID, ec2Prefix)
	zone, instance, _ := strings.Cut(path, "/")
	if !isAWS || len(zone) > maxZone || !IsEC2Instance(instance) {
		return "", "", false
	}
	parts := ec2ZoneForm.Get().FindStringSubmatch(zone)
	if parts == nil {
		return "", "", false
	}
	return parts[1], instance, true
}
