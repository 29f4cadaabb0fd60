// SPDX-License-Identifier: Apache-2.0

package hostiletext

import (
	"maps"
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

func TestChange(t *testing.T) {
	object := &certificatesv1.CertificateSigningRequest{}
	object.Name, object.Labels, object.Spec.Request = "name", map[string]string{"a": "label"}, []byte("bytes")
	paths := map[string]string{}
	Change(object, func(path, value string) string {
		if value != "" {
			paths[path] = value
		}
		return value + "!"
	})
	if want := map[string]string{"Name": "name", "Labels[a]": "label"}; !maps.Equal(paths, want) {
		t.Errorf("%q", paths)
	}
	if object.Name != "name!" || object.Labels["a"] != "label!" || string(object.Spec.Request) != "bytes" || object.OwnerReferences != nil || object.DeletionTimestamp != nil {
		t.Errorf("%+v", object)
	}
}

func TestFind(t *testing.T) {
	for name, output := range map[string]string{
		"raw": For("x"), "a forged line": "first\n" + forgedEntry, "an indented one": "a:\n  " + forgedItem,
		"not UTF-8": "\xff", "reordered": "\u202e", "blank letter": "\u3164",
	} {
		if len(Find(output)) == 0 {
			t.Errorf("%s: nothing is found in %q", name, output)
		}
	}
	if forged := `request="x` + forgedField + `"`; len(FindUnquoted(forged)) == 0 || len(Find(forged)) > 0 {
		t.Errorf("a forged field: %q in a log, %q elsewhere", FindUnquoted(forged), Find(forged))
	}
	for _, output := range []string{"", "one\ntwo\n", `request="` + strings.ReplaceAll(text.Escape(For("x")), `"`, `\"`) + `"`, text.Quote(For("x"), 4096)} {
		for _, problem := range FindUnquoted(output) {
			t.Error(problem)
		}
	}
	for _, problem := range Find(text.Line(For("x"), 4096)) { // Line does not quote
		t.Error(problem)
	}
}
