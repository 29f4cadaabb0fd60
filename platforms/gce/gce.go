// SPDX-License-Identifier: Apache-2.0

// Package gce asks Google Compute Engine for the endorsement keys of its instances' vTPMs. It is an
// example: it was tested against an imitation of Compute Engine, and never on Compute Engine.
//
// docs/platforms/gce.md has the rights and the settings that it needs.
package gce

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/platforms/internal/facts"
)

const (
	// few is up to how many instances of a zone are read one by one. A list returns all instances
	// of the zone, also those that are no Machines.
	few = 4
	// pageSize is the most that Compute Engine allows ("instances.list"). maxPages bounds the
	// instances of a zone.
	pageSize, maxPages = "500", 200
	// findConcurrency is how many zones are asked about at a time.
	findConcurrency = 4
	// resourceFields are the fields of resource.
	resourceFields = "kind,id,name,zone,lastStartTimestamp,shieldedInstanceConfig/enableVtpm"
)

var (
	project = `[a-z][a-z0-9-]{4,28}[a-z0-9]`
	// providerIDForm is gce://<project>/<zone>/<name>.
	providerIDForm = regexp.MustCompile(`^gce://(` + project + `)/([a-z]+-[a-z]+[0-9]{1,2}-[a-z][a-z0-9]{0,7})/([a-z](?:[a-z0-9-]{0,61}[a-z0-9])?)$`)
	projectForm    = regexp.MustCompile(`^` + project + `$`)
	idForm         = regexp.MustCompile(`^[1-9][0-9]{0,19}$`)
)

// platform is Compute Engine, for some projects.
type platform struct {
	api      *api
	projects []string
	// keys has the kinds of keys that each instance had in an earlier answer.
	keys facts.Facts[[]string]
}

// New returns Compute Engine, for the projects of a configuration.
func New(c Config, options platformkit.Options, budget *platformkit.Budget) (clusterapi.EKTrust, error) {
	for _, name := range c.Projects {
		if !projectForm.MatchString(name) {
			return nil, fmt.Errorf("%.64q is not the ID of a project", name)
		}
	}
	if len(c.Projects) == 0 {
		return nil, errors.New("no project is named")
	}
	api, err := newAPI(c, budget)
	if err != nil {
		return nil, err
	}
	return platformkit.New(&platform{api: api, projects: c.Projects}, options), nil
}

// resource is an instance in an answer.
type resource struct {
	Kind string `json:"kind"`
	// ID is immutable, and never used again. A name is.
	ID        string `json:"id"`
	Name      string `json:"name"`
	Zone      string `json:"zone"`
	LastStart string `json:"lastStartTimestamp"`
	Shielded  struct {
		EnableVTPM *bool `json:"enableVtpm"`
	} `json:"shieldedInstanceConfig"`
}

// place is where instances are: <project>/<zone>.
type place string

func (p place) path() string {
	project, zone, _ := strings.Cut(string(p), "/")
	return "projects/" + project + "/zones/" + zone + "/instances"
}

// split returns the parts of a location.
func split(location string) (at place, name string) {
	slash := strings.LastIndexByte(location, '/')
	return place(location[:slash]), location[slash+1:]
}

// Location returns <project>/<zone>/<name>.
func (p *platform) Location(m clusterapi.PlatformMachine) (string, error) {
	parts, err := platformkit.Match(m.ProviderID, providerIDForm)
	if err != nil {
		return "", fmt.Errorf("the provider ID %.128q does not have the form gce://<project>/<zone>/<name>", m.ProviderID)
	}
	if !slices.Contains(p.projects, parts[0]) {
		return "", fmt.Errorf("the provider ID is of the project %s, which the controller is not configured for", parts[0])
	}
	return strings.Join(parts, "/"), nil
}

// Find lists the instances of each zone, or gets them one by one where they are few.
func (p *platform) Find(ctx context.Context, _ types.NamespacedName, locations []string) ([]platformkit.Instance, error) {
	names := map[place][]string{}
	for _, location := range locations {
		at, name := split(location)
		names[at] = append(names[at], name)
	}
	var mu sync.Mutex
	var all []platformkit.Instance
	var calls errgroup.Group
	calls.SetLimit(findConcurrency)
	for at, wanted := range names {
		calls.Go(func() error {
			ask := p.list
			if len(wanted) <= few {
				ask = p.getEach
			}
			found, err := ask(ctx, at, wanted)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, found...)
			return err
		})
	}
	err := calls.Wait()
	return all, err
}

func (p *platform) list(ctx context.Context, at place, names []string) (found []platformkit.Instance, err error) {
	asked := map[string]bool{}
	for _, name := range names {
		asked[name] = true
	}
	query := url.Values{"maxResults": {pageSize}, "fields": {"kind,items(" + resourceFields + "),nextPageToken"}}
	for range maxPages {
		var page struct {
			Kind          string     `json:"kind"`
			Items         []resource `json:"items"`
			NextPageToken string     `json:"nextPageToken"`
		}
		err := p.api.get(ctx, at.path(), query, &page)
		if _, none := errors.AsType[*notFoundError](err); none {
			return found, nil // there is no such zone
		}
		if err == nil && page.Kind != "compute#instanceList" {
			err = errors.New("the answer is not a list of instances")
		}
		if err != nil {
			return found, fmt.Errorf("list %s: %w", at, err)
		}
		for _, r := range page.Items {
			if asked[r.Name] {
				found = append(found, r.instance(at, r.Name))
			}
		}
		if page.NextPageToken == "" {
			return found, nil
		}
		query.Set("pageToken", page.NextPageToken)
	}
	return found, fmt.Errorf("list %s: it has more than %d pages", at, maxPages)
}

// getEach goes on after an error, so that one instance that cannot be read hides no other.
func (p *platform) getEach(ctx context.Context, at place, names []string) (found []platformkit.Instance, err error) {
	var errs []error
	for _, name := range names {
		instance, err := p.getOne(ctx, at, name)
		if _, gone := errors.AsType[*notFoundError](err); gone {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		found = append(found, instance)
	}
	return found, errors.Join(errs...)
}

func (p *platform) getOne(ctx context.Context, at place, name string) (platformkit.Instance, error) {
	var r resource
	if err := p.api.get(ctx, at.path()+"/"+name, url.Values{"fields": {resourceFields}}, &r); err != nil {
		return platformkit.Instance{}, fmt.Errorf("get %s/%s: %w", at, name, err)
	}
	if r.Kind != "compute#instance" {
		return platformkit.Instance{}, fmt.Errorf("get %s/%s: the answer is not an instance", at, name)
	}
	return r.instance(at, name), nil
}

// instance returns the instance that was asked for, in whatever state: also a stopped one exists.
func (r resource) instance(at place, name string) platformkit.Instance {
	project, zone, _ := strings.Cut(string(at), "/")
	i := platformkit.Instance{Location: string(at) + "/" + name, ID: project + "/" + r.ID, Data: r}
	switch {
	case r.Name != name || !strings.HasSuffix(r.Zone, "/zones/"+zone) || !idForm.MatchString(r.ID):
		i.Refused = errors.New("the answer is about another instance, or has no ID")
	case r.Shielded.EnableVTPM == nil:
		i.Refused = errors.New("the answer does not say whether the instance has a vTPM")
	default:
		// A vTPM may be added or removed while an instance is stopped.
		i.Version = fmt.Sprint(r.LastStart, " ", *r.Shielded.EnableVTPM)
	}
	return i
}

// EndorsementKeys reads the keys by the instance's name. So it checks afterwards that the name is
// still that of the same instance.
func (p *platform) EndorsementKeys(ctx context.Context, found platformkit.Instance) ([]tpm.Fingerprint, error) {
	if !*found.Data.(resource).Shielded.EnableVTPM {
		p.keys.Set(found.ID, nil)
		return []tpm.Fingerprint{}, nil
	}
	at, name := split(found.Location)

	// 1. Read the keys. The answer also has signing keys, which are attestation keys.
	type entry struct {
		EKPub string `json:"ekPub"`
	}
	var identity struct {
		RSA2048 entry `json:"encryptionKey"`
		ECCP256 entry `json:"eccP256EncryptionKey"`
	}
	const action = "getShieldedInstanceIdentity"
	if err := p.api.get(ctx, at.path()+"/"+name+"/"+action, nil, &identity); err != nil {
		return nil, fmt.Errorf("%s: %w", action, err)
	}
	var eks []tpm.Fingerprint
	var kinds []string
	for _, key := range []struct {
		kind string
		entry
	}{{"encryptionKey", identity.RSA2048}, {"eccP256EncryptionKey", identity.ECCP256}} {
		if key.EKPub == "" {
			continue
		}
		ek, err := clusterapi.EKFingerprintPEM(key.EKPub)
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", action, key.kind, err)
		}
		eks, kinds = append(eks, ek), append(kinds, key.kind)
	}

	// 2. Not every instance has both. One that is no longer in the answer is an error: the node may
	// show it.
	if len(eks) == 0 {
		return nil, fmt.Errorf("%s: the instance has a vTPM, and the answer has no key", action)
	}
	for _, kind := range p.keys.Get(found.ID) {
		if !slices.Contains(kinds, kind) {
			return nil, fmt.Errorf("%s: the instance had an %s, and the answer has none", action, kind)
		}
	}

	// 3. Was it the same instance before and after?
	after, err := p.getOne(ctx, at, name)
	if err != nil {
		return nil, err
	}
	if after.Refused != nil || after.ID != found.ID || after.Version != found.Version {
		return nil, errors.New("the instance was replaced or started while its keys were read")
	}
	p.keys.Set(found.ID, kinds)
	return eks, nil
}

// notFoundError means that there is no such instance.
type notFoundError struct{}

func (*notFoundError) Error() string { return http.StatusText(http.StatusNotFound) }
