// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
)

// anyHasStatic reports whether an API server has static policies.
func (a staticAnswers) anyHasStatic() bool {
	return slices.ContainsFunc(a.servers, apiServer.hasStatic)
}

// forbidden reports whether the user may ask no API server.
func (a staticAnswers) forbidden() bool {
	return len(a.servers) > 0 && !slices.ContainsFunc(a.servers, func(s apiServer) bool { return !s.forbidden })
}

// unreached reports whether no API server answered.
func (a staticAnswers) unreached() bool {
	return len(a.servers) > 0 && !slices.ContainsFunc(a.servers, func(s apiServer) bool { return !s.unreached })
}

// anyNames reports whether the static policies of an API server name exactly these controllers.
func (a staticAnswers) anyNames(controllers []string) bool {
	return slices.ContainsFunc(a.servers, func(s apiServer) bool {
		return s.hasStatic() && exactDifference(controllers, s.static.Controllers) == ""
	})
}

// guardRevocation reports whether each API server has static policies that guard revocation.
func (a staticAnswers) guardRevocation(scope policyset.Scope) (bool, error) {
	release, err := policyset.ReleaseDigest(scope, true)
	return a.anyHasStatic() && !slices.ContainsFunc(a.servers, func(s apiServer) bool {
		return s.lacksStatic() || s.hasStatic() && s.static.Release != release
	}), err
}

// differences returns a problem for each way in which static policies are not those of this release
// and configuration. Each problem names the API servers concerned.
func (a staticAnswers) differences(scope policyset.Scope, controllers []string) (problems []PolicyProblem, err error) {
	var releases [2]string // with and without the guards of revocation
	for i, withRevocation := range []bool{true, false} {
		if releases[i], err = policyset.ReleaseDigest(scope, withRevocation); err != nil {
			return nil, err
		}
	}
	difference := func(s apiServer) string {
		switch {
		case !s.hasStatic():
			return ""
		case s.static.Scope != scope.String():
			return fmt.Sprintf("are written with --scope %.32q, not %s", s.static.Scope, scope)
		case !slices.Contains(releases[:], s.static.Release):
			return "are those of another release"
		}
		return exactDifference(controllers, s.static.Controllers)
	}
	var seen []string
	for _, s := range a.servers {
		d := difference(s)
		if d == "" || slices.Contains(seen, d) {
			continue
		}
		seen = append(seen, d)
		where := a.addresses(func(s apiServer) bool { return difference(s) == d })
		problems = append(problems, PolicyProblem{policyset.IdentityName, PolicyAltered, "the static policies of these API servers " + d + ": " + where})
	}
	return problems, nil
}

// exactDifference says how a list of controllers differs from the configured one, in any order.
func exactDifference(wanted, found []string) string {
	for _, n := range found {
		if !slices.Contains(wanted, n) {
			return fmt.Sprintf("name the controller %.128q, which is not configured", n)
		}
	}
	for _, n := range wanted {
		if !slices.Contains(found, n) {
			return fmt.Sprintf("do not name the controller %.128q", n)
		}
	}
	return ""
}

// lacking returns the problem that API servers have no static policies.
func (a staticAnswers) lacking() []PolicyProblem {
	if where := a.addresses(apiServer.lacksStatic); where != "" {
		return []PolicyProblem{{policyset.IdentityName, PolicyMissing, "these API servers have no static policies: " + where}}
	}
	return nil
}

// describe says in one line which API servers have static policies.
func (a staticAnswers) describe() string {
	says := "API servers with static policies: " + a.addresses(apiServer.hasStatic)
	if where := a.addresses(apiServer.lacksStatic); where != "" {
		says += "; without: " + where
	}
	return says
}

// unknown says what is not known about static policies.
func (a staticAnswers) unknown() (all []string) {
	digests := map[string]bool{}
	for _, s := range a.servers {
		switch {
		case s.hasStatic():
			digests[s.static.Digest] = true
		case !s.lacksStatic():
			all = append(all, "static policies of "+s.address+" are not known: "+s.unknown)
		}
	}
	if a.notAskedEach != "" {
		all = append(all, "not each API server was asked for static policies: "+a.notAskedEach)
	}
	if len(digests) > 1 {
		all = append(all, "API servers have different files of static policies")
	}
	return all
}

// addresses returns the addresses of the API servers that match, in one line.
func (a staticAnswers) addresses(match func(apiServer) bool) string {
	var all []string
	for _, s := range a.servers {
		if match(s) {
			all = append(all, s.address)
		}
	}
	return strings.Join(all, ", ")
}
