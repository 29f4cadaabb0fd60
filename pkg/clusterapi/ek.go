// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// annotationEK names the endorsement keys of a Machine, on it or on its InfraMachine. It has one or
// more, separated by commas or white space. Each is the SHA-256 of its SubjectPublicKeyInfo in
// lower-case hex, with or without "sha256:" before it. Users who may annotate these objects decide
// which machines are admitted.
const annotationEK = attestation.AnnotationEK

const (
	// maxEKs limits the EKs of one machine, as in an inventory, and maxAnnotation the annotation's
	// length.
	maxEKs, maxAnnotation = 16, 2048
	ekPrefix              = "sha256:"
)

// ekAnnotation is what an object's EK annotation says. The zero value: there is none.
type ekAnnotation struct {
	eks []string
	err error
}

func annotationOf(annotations map[string]string) ekAnnotation {
	value, ok := annotations[annotationEK]
	if !ok {
		return ekAnnotation{}
	}
	eks, err := parseEKs(value)
	return ekAnnotation{eks, err}
}

// parseEKs returns the fingerprints in an annotation, in the form of Evidence.EK.
func parseEKs(value string) ([]string, error) {
	fingerprints, err := EKsInAnnotation(value)
	if err != nil {
		return nil, err
	}
	var eks []string
	for _, ek := range fingerprints {
		eks = append(eks, ek.String())
	}
	return eks, nil
}

// EKsInAnnotation returns the fingerprints in a value of attestation.AnnotationEK, at least one.
func EKsInAnnotation(value string) ([]tpm.Fingerprint, error) {
	if len(value) > maxAnnotation {
		return nil, fmt.Errorf("the annotation %s is longer than %d bytes", annotationEK, maxAnnotation)
	}
	entries := strings.FieldsFunc(value, func(r rune) bool { return r == ',' || unicode.IsSpace(r) })
	if len(entries) == 0 || len(entries) > maxEKs {
		return nil, fmt.Errorf("the annotation %s has no EK, or more than %d", annotationEK, maxEKs)
	}
	var eks []tpm.Fingerprint
	for _, entry := range entries {
		ek, err := tpm.ParseFingerprint(strings.TrimPrefix(entry, ekPrefix))
		switch {
		case err != nil:
			return nil, fmt.Errorf("the annotation %s has %.80q, which is not the SHA-256 of an EK in lower-case hex", annotationEK, entry)
		case slices.Contains(eks, ek):
			return nil, fmt.Errorf("the annotation %s has the EK %s twice", annotationEK, ek)
		}
		eks = append(eks, ek)
	}
	return eks, nil
}

// mergeAnnotations returns what the annotations of a Machine and of its InfraMachine say together:
// only one of them is set, or both are equal.
func mergeAnnotations(machine, infra ekAnnotation) ([]string, error) {
	if err := errors.Join(machine.err, infra.err); err != nil {
		return nil, err
	}
	if machine.eks == nil {
		return infra.eks, nil
	}
	if infra.eks != nil && !slices.Equal(slices.Sorted(slices.Values(machine.eks)), slices.Sorted(slices.Values(infra.eks))) {
		return nil, fmt.Errorf("the annotations %s of the Machine and of its infrastructure differ", annotationEK)
	}
	return machine.eks, nil
}

// addAnnotated adds the EKs in annotations. A machine with invalid annotations gets none from
// there. If its InfraMachine cannot be read, the Machine's own annotation counts.
func (s *machineSource) addAnnotated(ctx context.Context, entries []machineEntry, now time.Time, problems *text.Problems) {
	kinds := map[schema.GroupKind]kindEKs{}
	for i := range entries {
		m := &entries[i]
		if m.pool {
			continue
		}
		var infra ekAnnotation
		if s.Infra != nil && m.infra.IsDefined() {
			kind := m.infra.GroupKind()
			listed, ok := kinds[kind]
			if !ok {
				listed = s.Infra.read(ctx, infraKind{kind, s.Cluster.Namespace}, now)
				kinds[kind] = listed
			}
			switch {
			case errors.Is(listed.err, errInfraKinds):
				problems.Set("InfraMachines", listed.err) // once for all kinds
			case listed.err != nil:
				problems.Set("infrastructure "+kind.String(), listed.err)
			}
			// An InfraMachine that is not in the list is about to be made, or about to go.
			if infra, ok = listed.names[m.infra.Name]; !ok {
				m.markUnavailable(verifier.EKAnnotation)
			}
		}
		eks, err := mergeAnnotations(m.annotation, infra)
		if err != nil {
			problems.Set("machine "+m.owner, err)
			m.markUnavailable(verifier.EKAnnotation)
		}
		m.addEKs(verifier.EKAnnotation, eks...)
	}
}

func (m *machineEntry) addEKs(source verifier.EKSource, eks ...string) {
	for _, ek := range eks {
		m.machine.EKs = append(m.machine.EKs, verifier.NamedEK{Source: source, EK: ek})
	}
}

// infraGroup is the group of InfraMachines, by Cluster API's contract.
const infraGroup = "infrastructure.cluster.x-k8s.io"

const (
	// infraReadInterval is how long one list of InfraMachines serves all decisions and Clusters.
	// infraRetry is the back-off for a kind that cannot be listed.
	infraReadInterval, infraRetry = time.Second, 10 * time.Second
	// infraTimeout limits a list. A list takes that long if the kind's conversion webhook is down.
	infraTimeout = 5 * time.Second
	// infraPage and infraPages limit a list.
	infraPage, infraPages = 500, 100
	// maxInfraKinds limits the kinds that are read in a namespace. Looking for a kind that does not
	// exist costs discovery, for which all others wait.
	maxInfraKinds = 8
	// infraExpiry is when an unused list is dropped.
	infraExpiry = 10 * time.Minute
)

// infraAnnotations reads the EK annotations of InfraMachines of any kind in the group
// infrastructure.cluster.x-k8s.io. It lists the metadata of a kind in a namespace at most once a
// second, for all Clusters. It does not watch: a kind that must not be read then fails alone. It
// needs list on the kinds that Machines refer to.
type infraAnnotations struct {
	reader client.Reader
	mapper meta.RESTMapper

	mu    sync.Mutex
	kinds map[infraKind]*infraList
}

type infraKind struct {
	schema.GroupKind
	namespace string
}

var errInfraKinds = fmt.Errorf("the Machines of the namespace refer to more than %d kinds: only the first ones are read", maxInfraKinds)

// kindEKs are the annotations of the InfraMachines of a kind, by name, or why they are not known.
type kindEKs struct {
	names map[string]ekAnnotation
	err   error
}

// infraList is the list that was read last.
type infraList struct {
	// lock is held by a goroutine that reads or lists.
	lock chan struct{}
	at   time.Time
	kindEKs

	used time.Time // infraAnnotations.mu is held
}

// newInfraAnnotations returns an infraAnnotations. The reader must ask the API server itself, as a
// manager's GetAPIReader does, and never a cache.
func newInfraAnnotations(reader client.Reader, mapper meta.RESTMapper) *infraAnnotations {
	return &infraAnnotations{reader: reader, mapper: mapper, kinds: map[infraKind]*infraList{}}
}

// read returns a kind's annotations, at most infraReadInterval old.
func (i *infraAnnotations) read(ctx context.Context, kind infraKind, now time.Time) kindEKs {
	list, err := i.listOf(kind, now)
	if err != nil {
		return kindEKs{err: err}
	}
	select {
	case list.lock <- struct{}{}:
		defer func() { <-list.lock }()
	case <-ctx.Done():
		return kindEKs{err: ctx.Err()}
	}
	keep := infraReadInterval
	if list.err != nil {
		keep = infraRetry
	}
	// now may be before list.at: this call may have waited for the lock during another call's read.
	if !list.at.IsZero() && now.Sub(list.at).Abs() < keep {
		return list.kindEKs
	}
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, infraTimeout)
	defer cancel()
	names, err := i.list(limited, kind)
	if ctx.Err() != nil {
		return kindEKs{err: ctx.Err()} // the caller's context ended: this is no error of the kind
	}
	list.at, list.kindEKs = now, kindEKs{names, err}
	if err != nil {
		// The back-off begins at the end of the failed list, which may have taken long.
		list.at = now.Add(time.Since(began))
	}
	return list.kindEKs
}

// listOf returns the entry of a kind, and drops unused ones. Users who may write a Machine can name
// any kind in it, so only the first few kinds of a namespace are read.
func (i *infraAnnotations) listOf(kind infraKind, now time.Time) (*infraList, error) {
	if kind.Group != infraGroup {
		return nil, fmt.Errorf("is no kind of InfraMachine: its group is not %s", infraGroup)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	others := 0
	for other, list := range i.kinds {
		if now.Sub(list.used) > infraExpiry {
			delete(i.kinds, other)
		} else if other.namespace == kind.namespace {
			others++
		}
	}
	if i.kinds[kind] == nil {
		if others >= maxInfraKinds {
			return nil, errInfraKinds
		}
		i.kinds[kind] = &infraList{lock: make(chan struct{}, 1)}
	}
	i.kinds[kind].used = now
	return i.kinds[kind], nil
}

func (i *infraAnnotations) list(ctx context.Context, kind infraKind) (map[string]ekAnnotation, error) {
	mapping, err := i.mapper.RESTMapping(kind.GroupKind)
	if err != nil {
		return nil, err
	}
	if mapping.Scope.Name() != meta.RESTScopeNameNamespace {
		return nil, errors.New("is no kind of InfraMachine: it has no namespace")
	}
	names := map[string]ekAnnotation{}
	list := &metav1.PartialObjectMetadataList{}
	for range infraPages {
		next := list.Continue
		list = &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(mapping.GroupVersionKind.GroupVersion().WithKind(kind.Kind + "List"))
		if err := i.reader.List(ctx, list, client.InNamespace(kind.namespace), client.Limit(infraPage), client.Continue(next)); err != nil {
			return nil, fmt.Errorf("list on the kind is needed: %w", err)
		}
		for n := range list.Items {
			names[list.Items[n].Name] = annotationOf(list.Items[n].Annotations)
		}
		if list.Continue == "" {
			return names, nil
		}
	}
	return nil, fmt.Errorf("there are more than %d", infraPage*infraPages)
}

// addInventoried adds the EKs that the inventory has by provider ID, and to instances of
// MachinePools their node name and addresses. Entries without a provider ID do not count, nor do
// their tokens.
func (s *machineSource) addInventoried(ctx context.Context, entries []machineEntry, now time.Time) {
	known, err := s.Inventory.Latest(ctx, now)
	for i := range entries {
		m := &entries[i]
		entry, ok := known.ByProviderID(m.machine.ProviderID)
		if err != nil || entry.Disputed || !ok && !known.Complete() {
			m.markUnavailable(verifier.EKInventory) // States says why
		}
		if !ok {
			continue
		}
		m.machine.Disputed = entry.Disputed
		for _, ek := range entry.EKs {
			m.addEKs(verifier.EKInventory, ek.Fingerprint)
		}
		if m.pool {
			m.addNames(verifier.Addresses{DNSNames: entry.DNSNames, IPs: entry.IPs}, verifier.NodeName{Source: verifier.NameInventory, Value: entry.NodeName})
		}
	}
}

// addNames adds names and addresses. It copies the lists, which other entries may share.
func (m *machineEntry) addNames(addresses verifier.Addresses, names ...verifier.NodeName) {
	m.machine.Names = slices.Concat(m.machine.Names, names)
	m.machine.Addresses.DNSNames = slices.Concat(m.machine.Addresses.DNSNames, addresses.DNSNames)
	m.machine.Addresses.IPs = slices.Concat(m.machine.Addresses.IPs, addresses.IPs)
}
