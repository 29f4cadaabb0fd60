// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// VersionTPM is the version of the TPM provider's documents that this package reads and writes.
const VersionTPM = "tpm/v1"

// maxVersions bounds a list of versions.
const maxVersions = 8

// Version is the version of a provider's documents: the provider's name, "/v", and a number from 1
// to 9999.
type Version string

// split returns the provider and the number, "" and 0 if v is no version.
func (v Version) split() (provider string, number int) {
	provider, digits, ok := strings.Cut(string(v), "/v")
	number, err := strconv.Atoi(digits)
	if !ok || err != nil || number < 1 || number > 9999 || strconv.Itoa(number) != digits || CheckProviderName(provider) != nil {
		return "", 0
	}
	return provider, number
}

// Versions is a list of versions of one provider, the newest first, each once, 1 to 8 of them.
type Versions []Version

// Check returns an error unless v is such a list.
func (v Versions) Check() error {
	if len(v) == 0 || len(v) > maxVersions {
		return fmt.Errorf("a list of versions has 1 to %d of them", maxVersions)
	}
	of, _ := v[0].split()
	last := 10000
	for _, version := range v {
		provider, number := version.split()
		if number == 0 || provider != of || number >= last {
			return errors.New("a list of versions must have those of one provider, the newest first, each once")
		}
		last = number
	}
	return nil
}

// String is the form of the annotation AnnotationVersions: separated by commas.
func (v Versions) String() string {
	parts := make([]string, len(v))
	for i := range v {
		parts[i] = string(v[i])
	}
	return strings.Join(parts, ",")
}

// ParseVersions reads the annotation AnnotationVersions. The value is not trusted: every user who
// may annotate the hello can write it.
func ParseVersions(annotation string) (Versions, error) {
	if len(annotation) > maxVersions*(MaxProviderName+8) {
		return nil, errors.New("a list of versions that is too long")
	}
	var v Versions
	for part := range strings.SplitSeq(annotation, ",") {
		v = append(v, Version(part))
	}
	if err := v.Check(); err != nil {
		return nil, err
	}
	return v, nil
}

// Common returns the newest version that is in both lists and not among tried, "" if there is none.
func (v Versions) Common(others Versions, tried ...Version) Version {
	for _, version := range v {
		if slices.Contains(others, version) && !slices.Contains(tried, version) {
			return version
		}
	}
	return ""
}
