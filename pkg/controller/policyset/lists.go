// SPDX-License-Identifier: Apache-2.0

package policyset

import (
	"regexp"
	"slices"
	"strings"
)

// Names of the variables of policies that are lists of literals.
const (
	listControllers   = "controllers"
	listSigners       = "signers"
	listBootstrappers = "bootstrappers"
	listMovers        = "movers"
	listUpgraders     = "upgraders"
)

// IsControllers reports whether the variable of that name lists the controllers. The list must have
// exactly the configured ones.
func IsControllers(variable string) bool { return variable == listControllers }

// IsExtensible reports whether an overlay may extend the list of that name. More entries in any
// other list might exempt somebody.
func IsExtensible(variable string) bool {
	return slices.Contains([]string{listSigners, listBootstrappers, listMovers}, variable)
}

const literal = `(?:'[^'"\\]*'|"[^'"\\]*")`

var (
	listOfLiterals = regexp.MustCompile(`^\s*\[\s*(?:` + literal + `\s*(?:,\s*` + literal + `\s*)*,?\s*)?\]\s*$`)
	oneLiteral     = regexp.MustCompile(literal)
)

// Literals returns the strings of a CEL list of plain string literals, and false for any other
// expression.
func Literals(expression string) (all []string, ok bool) {
	if !listOfLiterals.MatchString(expression) {
		return nil, false
	}
	for _, quoted := range oneLiteral.FindAllString(expression, -1) {
		all = append(all, quoted[1:len(quoted)-1])
	}
	return all, true
}

// listOf returns the CEL list of names that need no escape.
func listOf(names []string) string {
	if len(names) == 0 {
		return "[]"
	}
	return "[\n  '" + strings.Join(names, "',\n  '") + "'\n]"
}
