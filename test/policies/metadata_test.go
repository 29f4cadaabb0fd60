// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"crypto/rand"
	"fmt"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// The limits of node-attestation-metadata.
const (
	maxName            = 253
	maxLabels          = 32
	maxOwnAnnotations  = 32
	maxAnnotationBytes = 16384
	maxFinalizers      = 4
	maxOwners          = 4
	maxOwnerBytes      = 1024
)

func finalizers(count int) (all []string) {
	for i := range count {
		all = append(all, fmt.Sprintf("example.com/%05d", i))
	}
	return all
}

func owners(count int, name string) (all []metav1.OwnerReference) {
	for i := range count {
		all = append(all, metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: name, UID: types.UID(fmt.Sprintf("%05d", i))})
	}
	return all
}

type edit = func(*certificatesv1.CertificateSigningRequest)

// metadataRows are the largest that are accepted, the smallest that are not, and such as were used
// to exhaust the controller's memory.
func metadataRows() (accepted, refused, heavy map[string]edit) {
	labels := func(count int) edit {
		return func(c *certificatesv1.CertificateSigningRequest) { c.Labels = annotations(count) }
	}
	annotationsOf := func(count, bytes int, char string) edit {
		return func(c *certificatesv1.CertificateSigningRequest) {
			c.Annotations = annotations(count) // keys of five bytes
			c.Annotations["00000"] = strings.Repeat(char, (bytes-5*count)/len(char)) + strings.Repeat("x", (bytes-5*count)%len(char))
		}
	}
	finalizersOf := func(count int) edit {
		return func(c *certificatesv1.CertificateSigningRequest) { c.Finalizers = finalizers(count) }
	}
	const beside = len("v1Pod00000")
	ownersOf := func(count, bytes int, char string) edit {
		return func(c *certificatesv1.CertificateSigningRequest) {
			c.OwnerReferences = owners(count, strings.Repeat(char, (bytes-beside)/len(char))+strings.Repeat("x", (bytes-beside)%len(char)))
		}
	}
	generated := func(bytes int) edit {
		return func(c *certificatesv1.CertificateSigningRequest) { c.GenerateName = strings.Repeat("x", bytes) }
	}
	accepted = map[string]edit{
		"generateName":                 generated(maxName),
		"labels":                       labels(maxLabels),
		"annotations":                  annotationsOf(maxOwnAnnotations, maxAnnotationBytes, "x"),
		"annotation of four-byte text": annotationsOf(1, maxAnnotationBytes, "\U0001F511"),
		"finalizers":                   finalizersOf(maxFinalizers),
		"owners":                       ownersOf(maxOwners, maxOwnerBytes, "x"),
		"owner of four-byte text":      ownersOf(1, maxOwnerBytes, "\U0001F511"),
	}
	refused = map[string]edit{
		"generateName":                 generated(maxName + 1),
		"labels":                       labels(maxLabels + 1),
		"annotations":                  annotationsOf(maxOwnAnnotations+1, 1000, "x"),
		"annotations' bytes":           annotationsOf(1, maxAnnotationBytes+1, "x"),
		"annotation of four-byte text": annotationsOf(1, maxAnnotationBytes+1, "\U0001F511"),
		"finalizers":                   finalizersOf(maxFinalizers + 1),
		"owners":                       ownersOf(maxOwners+1, 100, "x"),
		"owner's name":                 ownersOf(1, maxOwnerBytes+1, "x"),
		"owner of four-byte text":      ownersOf(1, maxOwnerBytes+1, "\U0001F511"),
	}
	heavy = map[string]edit{
		"labels, 600 kB":       labels(9375),
		"annotation of 200 kB": annotationsOf(1, 200_000, "x"),
		"finalizers, 300 kB":   finalizersOf(10_000),
		"owner of 600 kB":      ownersOf(1, 600_000, "x"),
		"generateName, 600 kB": generated(600_000),
	}
	return accepted, refused, heavy
}

// One bootstrap token filed requests with 600 kB of labels until the controller had no memory left.
// So the policy limits what a request for one of its signers may carry beside its specification,
// for every requester.
func TestMetadataOnCreate(t *testing.T) {
	accepted, refused, heavy := metadataRows()
	create := func(client kubernetes.Interface, signer string, change edit, dryRun []string) error {
		csr := newRequest(signer)
		change(csr)
		_, err := client.CertificatesV1().CertificateSigningRequests().Create(t.Context(), csr, metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	for what, change := range accepted {
		t.Run(what, func(t *testing.T) {
			want(t, create(shared.bootstrapper, helloSigner, change, dryRun))
		})
	}
	for what, change := range refused {
		t.Run(what+", too many", func(t *testing.T) {
			for _, client := range []kubernetes.Interface{shared.bootstrapper, shared.node, shared.admin} {
				wantRefusedBy(t, create(client, tpmSigner, change, nil), metadataPolicy)
			}
			for _, signer := range ours {
				wantRefusedBy(t, create(shared.bootstrapper, signer, change, dryRun), metadataPolicy)
			}
		})
	}
	for what, change := range heavy {
		if err := create(shared.bootstrapper, helloSigner, change, nil); !refusedBy(err, metadataPolicy) {
			t.Errorf("%s: %v", what, err)
		}
	}
	all := func(csr *certificatesv1.CertificateSigningRequest) {
		for _, change := range []string{"labels", "annotations", "finalizers", "owners"} {
			accepted[change](csr)
		}
	}
	want(t, create(shared.bootstrapper, helloSigner, all, nil))
	// another signer's affair
	want(t, create(shared.admin, "example.com/x", heavy["labels, 600 kB"], nil))

	// The controller keeps the names of all requests, of every signer.
	for _, signer := range []string{helloSigner, "example.com/x"} {
		name := func(size int) edit {
			return func(csr *certificatesv1.CertificateSigningRequest) {
				csr.Name = (strings.ToLower(rand.Text()) + strings.Repeat("x", size))[:size]
			}
		}
		want(t, create(shared.admin, signer, name(maxName), nil))
		for _, size := range []int{maxName + 1, 400_000} {
			wantRefusedBy(t, create(shared.admin, signer, name(size), nil), metadataPolicy)
		}
	}
}

// The same limits hold for everybody who may change a request, through each path that lets metadata
// pass. The controller is exempt.
func TestMetadataOnUpdate(t *testing.T) {
	accepted, refused, _ := metadataRows()
	controller := as(t, controllerUser, "system:masters") // its own rights are tested elsewhere
	for path, subresources := range map[string][]string{"main": nil, "status": {"status"}, "approval": {"approval"}} {
		t.Run(path, func(t *testing.T) {
			name := filed(t, helloSigner)
			set := func(client kubernetes.Interface, change edit) error {
				csr := &certificatesv1.CertificateSigningRequest{}
				change(csr)
				return patch(t, client, types.MergePatchType, name, map[string]any{"metadata": csr.ObjectMeta}, subresources...)
			}
			for what, change := range refused {
				if err := set(shared.admin, change); !refusedBy(err, metadataPolicy) {
					t.Errorf("%s: %v", what, err)
				}
			}
			for what, change := range accepted {
				if err := set(shared.admin, change); err != nil {
					t.Errorf("%s: %v", what, err)
				}
				none := map[string]any{"labels": nil, "annotations": nil, "finalizers": nil, "ownerReferences": nil}
				want(t, patch(t, shared.admin, types.MergePatchType, name, map[string]any{"metadata": none}, subresources...))
			}
			want(t, set(controller, func(c *certificatesv1.CertificateSigningRequest) { c.Labels = annotations(maxLabels + 1) }))
		})
	}
}

// A request that was filed before the policy can be denied, changed otherwise, and emptied; the
// controller annotates it.
func TestMetadataFromBeforeThePolicies(t *testing.T) {
	name := shared.earlyMetadata
	set := func(client kubernetes.Interface, metadata map[string]any) error {
		return patch(t, client, types.MergePatchType, name, map[string]any{"metadata": metadata})
	}
	if csr := get(t, name); len(csr.Labels) != 2000 || len(csr.Finalizers) != 100 || len(csr.OwnerReferences) != 100 {
		t.Fatalf("it has %d labels, %d finalizers, %d owners", len(csr.Labels), len(csr.Finalizers), len(csr.OwnerReferences))
	}
	wantRefusedBy(t, set(shared.admin, map[string]any{"labels": map[string]any{"one": "more"}}), metadataPolicy)
	want(t, set(shared.admin, map[string]any{"annotations": map[string]any{"example.com/note": "free"}}))
	want(t, set(shared.controller, map[string]any{"annotations": map[string]any{reserved[0]: "{}"}}))
	want(t, decide(t.Context(), shared.admin, name, certificatesv1.CertificateDenied, nil))
	want(t, set(shared.admin, map[string]any{"labels": nil}))
	want(t, set(shared.admin, map[string]any{"finalizers": nil}))
	want(t, set(shared.admin, map[string]any{"ownerReferences": nil}))
}
