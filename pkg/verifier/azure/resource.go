// SPDX-License-Identifier: Apache-2.0

package azure

import (
	"errors"
	"regexp"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
)

// ProviderIDPrefix begins the spec.providerID of Machines and Nodes of Azure. The resource ID
// follows.
const ProviderIDPrefix = "azure://"

// maxResourceID bounds a resource ID, in bytes.
const maxResourceID = 512

// ResourceID names a VM in Azure Resource Manager. Resource IDs do not depend on case, so the
// fields are in lower case. Two values are equal if they name the same VM.
type ResourceID struct {
	// Subscription is a GUID.
	Subscription  string
	ResourceGroup string
	// ScaleSet is the scale set of the VM, if it is one in uniform orchestration. Else it is empty.
	ScaleSet string
	// VM is the name of the VM, or its number in the scale set.
	VM string
}

// The forms of names. Azure also allows letters beyond ASCII in the name of a resource group. A
// path of such a name would have more than one encoding, so it is not accepted.
var (
	groupForm  = regexp.MustCompile(`^[a-z0-9_().-]{0,89}[a-z0-9_()-]$`)
	nameForm   = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_.-]{0,78}[a-z0-9_])?$`)
	numberForm = regexp.MustCompile(`^(0|[1-9][0-9]{0,9})$`)
)

var errResourceID = errors.New("not the resource ID of a VM, or of a VM in a scale set")

// ParseProviderID parses azure:// and a resource ID.
func ParseProviderID(providerID string) (ResourceID, error) {
	path, found := strings.CutPrefix(providerID, ProviderIDPrefix)
	if !found {
		return ResourceID{}, errors.New("a provider ID of Azure begins with " + ProviderIDPrefix)
	}
	return ParseResourceID(path)
}

// ParseResourceID parses the path of a VM in Azure Resource Manager, in any case:
// /subscriptions/S/resourceGroups/G/providers/Microsoft.Compute/virtualMachines/N, or
// .../virtualMachineScaleSets/N/virtualMachines/I.
func ParseResourceID(path string) (ResourceID, error) {
	if len(path) > maxResourceID {
		return ResourceID{}, errResourceID
	}
	// Go's lower case also changes letters beyond ASCII, some of them into ASCII.
	for _, c := range []byte(path) {
		if c <= ' ' || c > '~' {
			return ResourceID{}, errResourceID
		}
	}
	parts := strings.Split(strings.ToLower(path), "/")
	if len(parts) != 9 && len(parts) != 11 {
		return ResourceID{}, errResourceID
	}
	id := ResourceID{Subscription: parts[2], ResourceGroup: parts[4], VM: parts[len(parts)-1]}
	form := nameForm
	if len(parts) == 11 {
		id.ScaleSet, form = parts[8], numberForm
	}
	if strings.ToLower(id.String()) != strings.Join(parts, "/") ||
		!cloudname.IsGUID(id.Subscription) || !groupForm.MatchString(id.ResourceGroup) || !form.MatchString(id.VM) ||
		len(parts) == 11 && !nameForm.MatchString(id.ScaleSet) {
		return ResourceID{}, errResourceID
	}
	return id, nil
}

// String returns the path of the VM in Azure Resource Manager. It is canonical, and needs no
// escaping in a URL.
func (r ResourceID) String() string {
	path := "/subscriptions/" + r.Subscription + "/resourceGroups/" + r.ResourceGroup + "/providers/Microsoft.Compute/"
	if r.ScaleSet != "" {
		path += "virtualMachineScaleSets/" + r.ScaleSet + "/"
	}
	return path + "virtualMachines/" + r.VM
}
