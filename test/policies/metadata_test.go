// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"crypto/rand"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"sort"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// The limits of node-attestation-metadata. maxBesideRequest follows from them: it is the size of a
// machine's request in etcd, without spec.request.
const (
	maxName            = 253
	maxLabels          = 32
	maxOwnAnnotations  = 32
	maxAnnotationBytes = 16384
	maxFinalizers      = 4
	maxOwners          = 4
	maxOwnerBytes      = 1024
	maxBesideRequest   = 56 << 10
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
			for _, signer := range forMachines {
				want(t, create(shared.admin, signer, change, dryRun))
			}
		})
	}
	for what, change := range refused {
		t.Run(what+", too many", func(t *testing.T) {
			for _, client := range []kubernetes.Interface{shared.bootstrapper, shared.node, shared.admin} {
				wantRefusedBy(t, create(client, tpmSigner, change, nil), metadataPolicy)
			}
			for _, signer := range forMachines {
				wantRefusedBy(t, create(asking(signer), signer, change, dryRun), metadataPolicy)
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
	want(t, create(shared.admin, helloSigner, all, nil))
	for _, change := range []string{"generateName", "labels", "annotations"} {
		want(t, create(shared.bootstrapper, helloSigner, accepted[change], nil))
	}
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

// The API server takes names with line ends, escape sequences and text that runs backwards. The
// names of honest clients pass: the plugin's, a kubelet's first one, generated ones, a provider's.
func TestNamesOfRequests(t *testing.T) {
	hash := sha512.Sum512_256([]byte("a kubelet's key"))
	kubelets := "node-csr-" + base64.RawURLEncoding.EncodeToString(hash[:])
	hostile := map[string]string{
		"entry of an inventory": "x\n- nodeName: control-plane-1\n  eks:\n  - fingerprint: " + strings.Repeat("66", 32) + "\n# y",
		"line of a log":         "x\nI1126 12:00:00.000000       1 act.go:1] \"decided\" outcome=\"Sign\"",
		"line end":              "x\n", "carriage return": "x\ry", "line separator": "x\u2028y", "escape sequence": "x\x1b[2J", "right to left": "x\u202ey",
		"no width": "x\u200by", "NUL": "x\x00y", "blank": "x y", "quote": `x"y`, "colon": "x:y", "other letters": "n\u00f6de", "capital": "Node", "underscore": "node_1",
		"first character": "-x", "last character": "x-", "empty label": "x..y", "kubelet's, a line end": kubelets + "\n", "kubelet's, longer": kubelets + "_",
		"kubelet's, blank": kubelets[:51] + " ", "kubelet's on a second line": "x\n" + kubelets,
	}
	try := func(client kubernetes.Interface, signer, name, generateName string) error {
		object := newRequest(signer)
		object.Name, object.GenerateName = name, generateName
		_, err := client.CertificatesV1().CertificateSigningRequests().Create(t.Context(), object, metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	for _, signer := range forMachines {
		for who, client := range map[string]kubernetes.Interface{"machine": asking(signer), "administrator": shared.admin} {
			t.Run(who+" asks "+signer, func(t *testing.T) {
				for what, name := range hostile {
					if err := try(client, signer, name, ""); !refusedBy(err, metadataPolicy) {
						t.Errorf("%s: %v", what, err)
					}
				}
				for _, what := range []string{"entry of an inventory", "escape sequence", "capital"} {
					if err := try(client, signer, "", hostile[what]); !refusedBy(err, metadataPolicy) {
						t.Errorf("generated, %s: %v", what, err)
					}
				}
				for _, name := range []string{csr.NewName(), kubelets, "csr-7xk2p", "acme.worker-1.example.com", "1"} {
					want(t, try(client, signer, name, ""))
				}
				want(t, try(client, signer, "", "csr-"))
			})
		}
	}
	// another signer's affair
	want(t, try(shared.admin, "example.com/x", hostile["blank"], ""))
}

// kube-controller-manager deletes a pending request after a day, unless it has a finalizer. With
// one bootstrap token somebody filled etcd for good. An owner keeps no request. But the garbage
// collector reads each owner, and the owner's own deletion may wait for the request. Machines need
// neither.
func TestMachinesSetNoFinalizersAndOwners(t *testing.T) {
	rows := map[string]edit{
		"finalizer": func(c *certificatesv1.CertificateSigningRequest) { c.Finalizers = finalizers(1) },
		"finalizer of the garbage collector": func(c *certificatesv1.CertificateSigningRequest) {
			c.Finalizers = []string{metav1.FinalizerOrphanDependents}
		},
		"owner": func(c *certificatesv1.CertificateSigningRequest) { c.OwnerReferences = owners(1, "x") },
	}
	for who, machine := range machines(t) {
		t.Run(who, func(t *testing.T) {
			for what, change := range rows {
				for _, signer := range machine.signers {
					if _, err := file(t.Context(), machine, signer, change); !refusedBy(err, metadataPolicy) {
						t.Errorf("%s, %s: %v", what, signer, err)
					}
				}
			}
		})
	}
	for what, change := range rows {
		if _, err := file(t.Context(), shared.admin, helloSigner, change); err != nil {
			t.Errorf("administrator, %s: %v", what, err)
		}
	}
}

// managed has a client claim fields in a new request's metadata.managedFields.
func managed(entries ...metav1.ManagedFieldsEntry) edit {
	return func(c *certificatesv1.CertificateSigningRequest) { c.ManagedFields = entries }
}

// fields is an entry of the manager under whose name besideRequest files.
func fields(t *testing.T, content any) metav1.ManagedFieldsEntry {
	t.Helper()
	raw, err := json.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}
	return metav1.ManagedFieldsEntry{
		Manager: "test", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "certificates.k8s.io/v1", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(string(raw)),
	}
}

// besideRequest files a request as a dry run, and returns what etcd would store of it beside
// spec.request, in bytes.
func besideRequest(t *testing.T, client kubernetes.Interface, signer string, changes ...edit) (int, error) {
	t.Helper()
	object := newRequest(signer)
	for _, change := range changes {
		change(object)
	}
	stored, err := client.CertificatesV1().CertificateSigningRequests().Create(t.Context(), object, metav1.CreateOptions{DryRun: dryRun, FieldManager: "test"})
	if err != nil {
		return 0, err
	}
	return stored.Size() - len(stored.Spec.Request), nil
}

// A client that files a request may fill managedFields. The API server takes a megabyte of them.
func TestManagedFieldsOnCreate(t *testing.T) {
	type tree = map[string]any
	many := func(count, length int) tree {
		leaves := tree{}
		for i := range count {
			leaves[fmt.Sprintf("f:%05d%s", i, strings.Repeat("x", length))] = tree{}
		}
		return leaves
	}
	deep := tree{}
	for range 2000 {
		deep = tree{"f:" + strings.Repeat("x", 200): deep}
	}
	var others []metav1.ManagedFieldsEntry
	for i := range 200 {
		entry := fields(t, tree{"f:metadata": tree{"f:labels": many(10, 200)}})
		entry.Manager, entry.Operation = fmt.Sprint("manager-", i), metav1.ManagedFieldsOperationApply
		others = append(others, entry)
	}
	wide := tree{}
	for a := range 40 {
		of := tree{}
		for b := range 40 {
			of[fmt.Sprintf("f:%d", b)] = many(40, 1)
		}
		wide[fmt.Sprintf("f:%d", a)] = of
	}
	version := fields(t, tree{"f:metadata": tree{"f:labels": tree{}}})
	version.APIVersion = strings.Repeat("v", 600_000)
	for what, change := range map[string]edit{
		"other managers": managed(others...), "many fields": managed(fields(t, tree{"f:metadata": tree{"f:labels": many(20_000, 1)}})),
		"many fields above": managed(fields(t, tree{"f:metadata": many(20_000, 1)})), "many fields at the top": managed(fields(t, many(20_000, 1))),
		"long fields": managed(fields(t, tree{"f:metadata": tree{"f:labels": many(3, 200_000)}})), "deep fields": managed(fields(t, deep)),
		"deep below": managed(fields(t, tree{"f:metadata": tree{"f:labels": tree{"f:x": deep}}})), "version": managed(version),
		"as many as pass in each place": managed(fields(t, wide)),
	} {
		// What the API server does not understand it drops.
		if bytes, err := besideRequest(t, shared.bootstrapper, helloSigner, change); err == nil && bytes > maxBesideRequest || err != nil && !refusedBy(err, metadataPolicy) {
			t.Errorf("%s: %d bytes, %v", what, bytes, err)
		}
	}
	// as an administrator's tool files a copy of a request
	copied := fields(t, tree{"f:metadata": tree{"f:labels": tree{".": tree{}, "f:app": tree{}}}, "f:spec": tree{"f:request": tree{}, "f:signerName": tree{}, "f:usages": tree{}}})
	_, err := besideRequest(t, shared.admin, helloSigner, managed(copied))
	want(t, err)
}

// A machine's request takes at most maxBesideRequest in etcd beside spec.request, with all that
// fits into the other fields, and as much as passes in managedFields.
func TestRequestBesideItsSpecification(t *testing.T) {
	names := func(c *certificatesv1.CertificateSigningRequest) {
		c.Name, c.GenerateName = strings.ToLower(rand.Text())+strings.Repeat("x", maxName-26), strings.Repeat("x", maxName)
		c.Labels, c.Annotations = map[string]string{}, map[string]string{"x": strings.Repeat("x", maxAnnotationBytes-1)}
		c.Spec.ExpirationSeconds = new(int32(1 << 30))
		for i := range maxLabels {
			c.Labels[fmt.Sprint(i)] = strings.Repeat("x", 63)
		}
	}
	keys := func(c *certificatesv1.CertificateSigningRequest) {
		names(c)
		c.Labels, c.Annotations = map[string]string{}, map[string]string{}
		for i := range maxLabels {
			key := fmt.Sprintf("%s%s/%02d%s", strings.Repeat(strings.Repeat("x", 63)+".", 3), strings.Repeat("x", 61), i, strings.Repeat("x", 61))
			c.Labels[key], c.Annotations[key] = strings.Repeat("x", 63), strings.Repeat("x", maxAnnotationBytes/maxOwnAnnotations-len(key))
		}
	}
	largest := 0
	for what, full := range map[string]edit{"long values": names, "long keys": keys} {
		for _, char := range []string{"x", "\x01"} { // JSON has the second one as six characters
			create := func(length int) (int, error) {
				leaf := map[string]any{"f:" + strings.Repeat(char, length): map[string]any{}}
				return besideRequest(t, shared.bootstrapper, tpmSigner, full, managed(fields(t, map[string]any{"f:metadata": map[string]any{"f:labels": leaf}})))
			}
			refused := sort.Search(1<<15, func(length int) bool {
				_, err := create(length)
				return refusedBy(err, metadataPolicy)
			})
			bytes, err := create(max(refused-1, 0))
			if err != nil || bytes > maxBesideRequest {
				t.Errorf("%s, %q: %d bytes, %v", what, char, bytes, err)
			}
			largest = max(largest, bytes)
		}
	}
	t.Logf("at most %d bytes", largest)
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
