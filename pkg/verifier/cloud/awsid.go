// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"regexp"
	"strings"
)

// The forms of AWS's names. An instance ID has 8 hex digits if the instance is of before 2016, else
// 17. A zone is an availability zone, a local zone (us-west-2-lax-1a) or a Wavelength zone.
var (
	ec2InstanceForm = regexp.MustCompile(`^i-([0-9a-f]{8}|[0-9a-f]{17})$`)
	ec2ZoneForm     = regexp.MustCompile(`^[a-z]{2}(-[a-z0-9]+){2,6}$`)
	awsAccountForm  = regexp.MustCompile(`^[0-9]{12}$`)
)

// maxZone bounds the name of a zone. The longest that are known have 23 characters.
const maxZone = 64

// IsEC2InstanceID reports whether id has the form of an instance's ID: i-0123456789abcdef0.
func IsEC2InstanceID(id string) bool { return ec2InstanceForm.MatchString(id) }

// IsAWSAccount reports whether account has the form of an account's ID: 12 digits.
func IsAWSAccount(account string) bool { return awsAccountForm.MatchString(account) }

// IsEC2ProviderID reports whether a machine's spec.providerID is aws:///<zone>/<instance ID>, as
// AWS's cloud provider sets it. The zone is not compared: the ID alone names the instance.
func IsEC2ProviderID(providerID, instanceID string) bool {
	path, isAWS := strings.CutPrefix(providerID, "aws:///")
	zone, id, hasZone := strings.Cut(path, "/")
	return isAWS && hasZone && IsEC2InstanceID(id) && id == instanceID && len(zone) <= maxZone && ec2ZoneForm.MatchString(zone)
}
