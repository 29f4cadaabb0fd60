// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

const (
	// firstPoll and lastPoll are the first and the longest pause between two polls. The pauses
	// grow.
	firstPoll, lastPoll = 500 * time.Millisecond, 5 * time.Second
	// lastPollMany is for more than manyNodes nodes, since each poll reads the objects of all.
	lastPollMany = 10 * time.Second
)

// errWaitEnded says that the user or --timeout ended a wait.
var errWaitEnded = errors.New("the wait has ended")

// stop is an error that ends a wait. Other errors are shown, and poll tries again.
type stop struct{ error }

// poll calls look until look reports that it is done. look also returns the progress to show.
func (i *invocation) poll(ctx context.Context, timeout, longest time.Duration, look func(context.Context) (done bool, progress string, err error)) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	shown, pause := "", firstPoll
	for {
		done, progress, err := look(ctx)
		var final stop
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return errWaitEnded
		case errors.As(err, &final):
			return final.error
		case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
			return err
		default:
			progress = sprintf("warning: trying again: %v", err)
		}
		if progress != "" && progress != shown {
			i.say("%s", progress)
			shown = progress
		}
		if err == nil && done {
			return nil
		}
		select {
		case <-ctx.Done():
			return errWaitEnded
		case <-time.After(pause):
			pause = min(pause*3/2, longest)
		}
	}
}

// waitEnded returns the failure after errWaitEnded. ctx is the command's.
func waitEnded(ctx context.Context, timeout time.Duration, hint, format string, arguments ...any) error {
	why := "after " + plainDuration(timeout)
	if ctx.Err() != nil {
		why = "interrupted"
	}
	return &failure{codeTimeout, hint, fmt.Errorf("%s: %s", why, fmt.Sprintf(format, arguments...))}
}

// revocationProgress is how far a revocation has come.
type revocationProgress struct {
	revoked int
	back    int
	waiting []string
	// lost are nodes with certificates that are neither in a record nor in a RevocationSlice, and
	// lostCertificates is the number of these certificates.
	lost             []string
	lostCertificates int
}

// awaitNodes waits until every node that the plan waits for is back.
func (i *invocation) awaitNodes(ctx context.Context, a *access, p *revocationPlan, timeout time.Duration) error {
	waited := p.waited()
	longest := lastPoll
	if len(p.nodes) > manyNodes {
		longest = lastPollMany
	}
	begin := time.Now()
	if p.object.CreationTimestamp.IsZero() {
		p.object.CreationTimestamp.Time = i.now
	}
	i.say("waiting for the revocation, and for %s to come back; Ctrl-C ends the wait, not the revocation", text.Count(len(waited), "node"))
	var last revocationProgress
	err := i.poll(ctx, timeout, longest, func(ctx context.Context) (bool, string, error) {
		at, err := a.observe(ctx, p, i.clock())
		if err != nil {
			return false, "", err
		}
		last = at
		progress := fmt.Sprintf("%d of %d certificates revoked, %d of %d nodes back", at.revoked, p.certificates, at.back, len(waited))
		if len(at.waiting) > 0 {
			progress += "; waiting for " + text.Names(at.waiting)
		}
		return len(at.waiting) == 0, progress, nil
	})
	if errors.Is(err, errWaitEnded) {
		return waitEnded(ctx, timeout, "look again: kubectl attest revocations, and kubectl attest describe NODE",
			"the revocation %s goes on; %d of %d nodes are back, waiting for %s", p.object.Name, last.back, len(waited), text.Names(last.waiting))
	}
	if err != nil {
		return err
	}
	if err = i.printf("%s revoked, %s back after %s", text.Count(last.revoked, "certificate"), text.Count(last.back, "node"), time.Since(begin).Round(time.Second)); err != nil || len(last.lost) == 0 {
		return err
	}
	return &failure{codeNotInForce, "once these nodes have records again, run the command again",
		fmt.Errorf("NOT revoked: %s, whose records were deleted meanwhile; nodes: %s", text.Count(last.lostCertificates, "certificate"), text.Names(last.lost))}
}

// observe reads how far a revocation has come.
func (a *access) observe(ctx context.Context, p *revocationPlan, now time.Time) (revocationProgress, error) {
	object := &v1alpha1.NodeRevocation{}
	if err := a.records.Get(ctx, client.ObjectKeyFromObject(p.object), object); apierrors.IsNotFound(err) {
		return revocationProgress{}, stop{&failure{codeNotFound, "what is revoked stays revoked", fmt.Errorf("the NodeRevocation %s was deleted: the rest is not revoked", p.object.Name)}}
	} else if err != nil {
		return revocationProgress{}, reached(err)
	}
	p.object.Status = object.Status
	names := p.names(func(plannedNode) bool { return true })
	records, err := a.recordsOf(ctx, names)
	if err != nil {
		return revocationProgress{}, err
	}
	nodes, err := a.readNodes(ctx, names)
	if err != nil {
		return revocationProgress{}, err
	}
	lists, err := a.readLists(ctx, p.object.Spec.Cluster)
	if err != nil {
		return revocationProgress{}, err
	}
	var at revocationProgress
	for _, n := range p.nodes {
		left, lost, renewed := 0, 0, false
		recorded := map[string]*v1alpha1.IssuedCertificate{}
		for k := range records[n.name] {
			for c := range slices.Values(records[n.name][k].Status.Certificates) {
				recorded[c.SHA256] = &c
				renewed = renewed || isNewer(&c, n, p.object, now)
			}
		}
		for _, sum := range n.certificates {
			c, isRecorded := recorded[sum]
			_, isListed := lists.entries[sum]
			switch {
			case isListed, isRecorded && c.Revoked, !now.Before(n.ends[sum]):
				at.revoked++
			case isRecorded, lists.current[sum]:
				left++
			default:
				lost++
			}
		}
		if lost > 0 {
			at.lost, at.lostCertificates = append(at.lost, n.name), at.lostCertificates+lost
		}
		waits, allRevoked := n.ready && n.absent == "", left == 0
		switch {
		case len(records[n.name]) == 0 && allRevoked: // no node comes back under this record
		case waits && allRevoked && renewed && nodes[n.name].ready:
			at.back++
		case waits, !allRevoked && p.atOnce():
			at.waiting = append(at.waiting, n.name)
		}
	}
	return at, nil
}

// isNewer reports whether a node got a certificate since the revocation that is valid.
func isNewer(c *v1alpha1.IssuedCertificate, n plannedNode, r *v1alpha1.NodeRevocation, now time.Time) bool {
	return !c.Revoked && now.Before(c.NotAfter.Time) && !slices.Contains(n.certificates, c.SHA256) &&
		!c.FormerEK && !r.Selects(c)
}

// recordsOf returns the records of these nodes, by the node's name.
func (a *access) recordsOf(ctx context.Context, names []string) (map[string][]v1alpha1.NodeAttestation, error) {
	all := map[string][]v1alpha1.NodeAttestation{}
	if len(names) > manyNodes {
		records, err := a.readRecords(ctx)
		for _, r := range records {
			all[r.Spec.NodeName] = append(all[r.Spec.NodeName], r)
		}
		return all, err
	}
	for _, name := range names {
		records, err := a.readRecords(ctx, client.MatchingFields{v1alpha1.FieldNodeName: name})
		if err != nil {
			return nil, err
		}
		all[name] = records
	}
	return all, nil
}

// clock is the time now. The invocation's now is that of its start.
func (i *invocation) clock() time.Time {
	if i.Program.now != nil {
		return i.Program.now()
	}
	return time.Now()
}
