// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/terminal"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

const (
	// firstPoll and lastPoll are the first and the longest pause between two polls. The pauses
	// grow.
	firstPoll, lastPoll = 500 * time.Millisecond, 5 * time.Second
	// maxReason is how many characters a reason has at most, by the CRDs.
	maxReason = 256
)

// plan is what a command is about to do. The command makes the plan, and change carries it out. So
// what is printed, confirmed and applied is one value.
type plan struct {
	text planText
	// nothing is the failure if there is nothing to change.
	nothing error
	// question asks for the confirmation. otherwise says what did not happen without one.
	question, otherwise string
	// waitOnly says that the plan changes nothing, so that nobody has to confirm it.
	waitOnly bool
	stages   []stage
}

// stage is a part of a plan. It begins when the stage before it is complete.
type stage struct {
	writes []write
	wait   *wait
	// mustBeInForce says that the stage fails if API servers do not refuse revoked certificates.
	mustBeInForce bool
}

// write changes one object. kind and verb are for the line that reports it.
type write struct {
	kind, verb string
	object     client.Object
	apply      func(context.Context) error
}

// wait is what a stage waits for. All fields but look and ended are optional.
type wait struct {
	begins string
	// look reports whether the wait is over, and the progress to show. poll says which errors end
	// the wait. longest replaces lastPoll.
	look    func(context.Context) (done bool, progress string, err error)
	longest time.Duration
	// settle is how long to wait once look is done.
	settle time.Duration
	// finish reports the result. took is the time that the wait took.
	finish func(took time.Duration) error
	// ended says how things are if the user or --timeout ended the wait. hint says what to do then.
	ended func() string
	hint  string
}

// changeFlags are the flags of each command that changes something.
type changeFlags struct {
	dryRun, yes, wait bool
	timeout           time.Duration
}

func (f *changeFlags) add(c *cobra.Command, timeout time.Duration) {
	c.Flags().BoolVar(&f.dryRun, "dry-run", false, "say what would happen, and change nothing")
	f.addYes(c)
	c.Flags().BoolVar(&f.wait, "wait", true, "wait, and show the progress")
	c.Flags().DurationVar(&f.timeout, "timeout", timeout, "how long to wait; 0 waits without an end")
}

func (f *changeFlags) addYes(c *cobra.Command) {
	c.Flags().BoolVarP(&f.yes, "yes", "y", false, "do not ask")
}

// addReason adds the flag that goes with changeFlags, if a change is recorded with a reason.
func addReason(c *cobra.Command, reason *string) {
	c.Flags().StringVar(reason, "reason", "", "why; for the records, Events and the decision log")
}

// checkReason checks the flag --reason by the rules of the CRDs.
func checkReason(reason string) error {
	switch n := utf8.RuneCountInString(reason); {
	case strings.TrimSpace(reason) == "":
		return cli.Usage(errors.New("--reason is required: it goes to the records, Events and the decision log"))
	case n > maxReason:
		return cli.Usage(fmt.Errorf("--reason has %d characters: at most %d are allowed", n, maxReason))
	case !utf8.ValidString(reason) || strings.ContainsFunc(reason, func(r rune) bool { return !unicode.IsPrint(r) }):
		return cli.Usage(errors.New("--reason has characters that are not printable"))
	}
	return nil
}

// change is the only way in which a command changes something: plan, print, confirm, apply, wait.
func (i *invocation) change(ctx context.Context, f *changeFlags, makePlan func(context.Context, *access) (*plan, error)) error {
	if f.timeout < 0 {
		return cli.Usage(errors.New("--timeout must not be negative"))
	}
	// 1. Plan. This only reads.
	a, err := i.open(ctx)
	if err != nil {
		return err
	}
	p, err := makePlan(ctx, a)
	if err != nil {
		return err
	}
	// 2. Print. With --dry-run the plan is the output, and nothing else happens.
	if f.dryRun {
		_, err := io.WriteString(i.Stdout, p.text.String()+"Nothing was changed: --dry-run.\n")
		return err
	}
	if _, err := io.WriteString(i.Stderr, p.text.String()); err != nil {
		return err
	}
	if p.nothing != nil {
		return p.nothing
	}
	// 3. Confirm.
	if !f.yes && !p.waitOnly {
		if err := i.confirm(ctx, p.question, p.otherwise); err != nil {
			return err
		}
	}
	waiting, cancel := ctx, func() {} // the stages share --timeout
	if f.timeout > 0 {
		waiting, cancel = context.WithTimeout(ctx, f.timeout)
	}
	defer cancel()
	for _, s := range p.stages {
		// 4. Apply. Report each write at once: a failure after it does not undo it.
		for _, w := range s.writes {
			if err := w.apply(ctx); err != nil {
				return err
			}
			if err := i.printf("%s %s %s", w.kind, w.object.GetName(), w.verb); err != nil {
				return err
			}
		}
		// 5. Wait.
		if s.wait != nil && f.wait {
			err := i.await(waiting, s.wait)
			if errors.Is(err, errWaitEnded) {
				why := "after " + plainDuration(f.timeout)
				if ctx.Err() != nil {
					why = "interrupted"
				}
				return cli.Fail(codeTimeout, s.wait.hint, errors.New(why+": "+s.wait.ended()))
			}
			if err != nil {
				return err
			}
		}
		if s.mustBeInForce {
			if err := i.mustBeInForce(ctx, a); err != nil {
				return err
			}
		}
	}
	return nil
}

// confirm asks. otherwise says what did not happen without a confirmation.
func (i *invocation) confirm(ctx context.Context, question, otherwise string) error {
	err := terminal.Confirm(ctx, i.Stdin, i.Stderr, text.Line(question, maxMessage))
	switch {
	case errors.Is(err, terminal.ErrNobody):
		return cli.Fail(codeNotConfirmed, "--yes confirms it in a script", fmt.Errorf("%s: %w", otherwise, err))
	case errors.Is(err, terminal.ErrDeclined):
		return cli.Fail(codeNotConfirmed, "", errors.New(otherwise))
	}
	return err
}

func creation(c client.Client, kind string, object client.Object) write {
	return write{kind, "created", object, func(ctx context.Context) error { return reached(c.Create(ctx, object)) }}
}

// deletion deletes exactly the object that was read. If unchanged is set, an object that has
// changed since then stays, too. The command look shows the object again.
func deletion(c client.Client, kind string, object client.Object, unchanged bool, look string) write {
	return write{kind, "deleted", object, func(ctx context.Context) error {
		uid, version := object.GetUID(), object.GetResourceVersion()
		preconditions := client.Preconditions{UID: &uid}
		if unchanged {
			preconditions.ResourceVersion = &version
		}
		err := reached(c.Delete(ctx, object, preconditions))
		switch {
		case apierrors.IsConflict(err):
			return cli.Fail(codeUnexpected, "look at it again: "+look, fmt.Errorf("%s %s was not deleted: it has changed since it was shown", kind, object.GetName()))
		case apierrors.IsNotFound(err):
			return cli.Fail(codeNotFound, "", fmt.Errorf("%s %s is gone already", kind, object.GetName()))
		}
		return err
	}}
}

// errWaitEnded says that the user or --timeout ended a wait.
var errWaitEnded = errors.New("the wait has ended")

// stop is an error that ends a wait. Other errors are shown, and poll tries again.
type stop struct{ error }

func (i *invocation) await(ctx context.Context, w *wait) error {
	begin := time.Now()
	if w.begins != "" {
		i.say("%s", w.begins)
	}
	if err := i.poll(ctx, cmp.Or(w.longest, lastPoll), w.look); err != nil {
		return err
	}
	if w.settle > 0 {
		select {
		case <-ctx.Done():
			return errWaitEnded
		case <-time.After(w.settle):
		}
	}
	if w.finish == nil {
		return nil
	}
	return w.finish(time.Since(begin))
}

// poll calls look until look reports that it is done. look also returns the progress to show.
func (i *invocation) poll(ctx context.Context, longest time.Duration, look func(context.Context) (done bool, progress string, err error)) error {
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

// clock is the time now. The invocation's now is that of its start.
func (i *invocation) clock() time.Time {
	if i.Program.now != nil {
		return i.Program.now()
	}
	return time.Now()
}

// planText collects the lines of a plan. Peers may have written parts of them.
type planText struct{ strings.Builder }

func (p *planText) line(format string, arguments ...any) {
	_, _ = fmt.Fprintln(p, text.Line(sprintf(format, arguments...), maxMessage))
}

func (p *planText) item(format string, arguments ...any) {
	_, _ = fmt.Fprint(p, "  - ")
	p.line(format, arguments...)
}
