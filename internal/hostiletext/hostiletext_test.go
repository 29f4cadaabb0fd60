// SPDX-License-Identifier: Apache-2.0

package hostiletext

import (
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

func TestPlantReachesEachField(t *testing.T) {
	object := &certificatesv1.CertificateSigningRequest{}
	object.Spec.SignerName = "kept"
	Plant(object, "Spec.SignerName")
	for place, got := range map[string]string{
		"Name":                         object.Name,
		"OwnerReferences[0].Kind":      object.OwnerReferences[0].Kind,
		"ManagedFields[0].Manager":     object.ManagedFields[0].Manager,
		"Annotations[value]":           object.Annotations[For("Annotations[key]")],
		"Spec.Extra[value][0]":         object.Spec.Extra[For("Spec.Extra[key]")][0],
		"Spec.Request":                 string(object.Spec.Request),
		"Spec.Usages[0]":               string(object.Spec.Usages[0]),
		"Status.Conditions[0].Message": object.Status.Conditions[0].Message,
	} {
		if got != For(place) {
			t.Errorf("%s is %.40q", place, got)
		}
	}
	if object.Spec.SignerName != "kept" {
		t.Error("a field to keep was planted")
	}
}

func TestFind(t *testing.T) {
	for name, output := range map[string]string{
		"raw": For("x"), "a forged line": "first\n" + forgedEntry, "an indented one": "a:\n  " + forgedItem, "a forged field": `request="x` + forgedField + `"`,
		"not UTF-8": "\xff", "reordered": "\u202e", "blank letter": "\u3164",
	} {
		if len(Find(output)) == 0 {
			t.Errorf("%s: nothing is found in %q", name, output)
		}
	}
	for _, output := range []string{"", "one\ntwo\n", text.Line(For("x"), 4096), `request="` + strings.ReplaceAll(text.Escape(For("x")), `"`, `\"`) + `"`, text.Quote(For("x"), 4096)} {
		for _, problem := range Find(output) {
			if !strings.HasPrefix(problem, "a forged field") { // Line does not quote
				t.Error(problem)
			}
		}
	}
}
