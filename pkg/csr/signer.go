// SPDX-License-Identifier: Apache-2.0

package csr

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// CheckSignerName applies the API server's rule: a domain of two segments or more, a slash, a path
// (certificates.k8s.io/v1, spec.signerName). An error names the field.
func CheckSignerName(field, name string) error {
	domain, path, _ := strings.Cut(name, "/")
	wrong := !strings.Contains(domain, ".") || len(validation.IsDNS1123Subdomain(domain)) > 0
	for label := range strings.SplitSeq(domain, ".") {
		wrong = wrong || len(validation.IsDNS1123Label(label)) > 0
	}
	for label := range strings.SplitSeq(path, ".") {
		wrong = wrong || len(validation.IsDNS1123Subdomain(label)) > 0
	}
	// A path may consist of a name and a namespace.
	if wrong || len(path) > validation.DNS1123SubdomainMaxLength+validation.DNS1123LabelMaxLength+1 {
		return fmt.Errorf("%s %.253q: must be like example.com/name, the domain with a dot, in lower case", field, name)
	}
	return nil
}
