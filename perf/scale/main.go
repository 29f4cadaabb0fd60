// SPDX-License-Identifier: Apache-2.0

// scale measures the controller with many machines at once: its speed, its cost, and how that
// grows. It uses a real etcd and kube-apiserver, the shipped binary, and the shipped rights and
// policies. It prints a table per measurement, and fails where a bound that is promised does not
// hold.
//
//	go run ./scale                  # all of them
//	go run ./scale -only enrol,cost # some
//	go run ./scale -only cost -profile /tmp/profiles
//	go run ./scale -size 0.05       # all of them with a twentieth of the machines
//
// -size is for trying the program. Bounds on time hold with fewer machines, too.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// measurement is one table or more. It starts what it needs, and leaves nothing behind.
type measurement struct {
	name, about string
	run         func(ctx context.Context, b *bench) error
}

// measurements are in the order in which they are run.
var measurements = []measurement{
	{"enrol", "a thousand machines enrol at once with two replicas, of which one is killed again and again", enrol},
	{"compare", "certificates per second, beside kube-controller-manager's approver and signer", compare},
	{"cost", "processor time and API calls per enrolment and per renewal, beside kube-controller-manager's", cost},
	{"junk", "one token files ten thousand bad requests, while machines with other tokens enrol", junk},
	{"shared", "one token files a hundred thousand hellos, or copies of a machine's, while machines with the same token enrol", shared},
	{"revoked", "what writes and reads cost with policies for revoked certificates, with the authorizer, and with neither", revoked},
	{"memory", "memory of the controller with records and machines, idle and while machines enrol", memoryOf},
	{"growth-nodes", "what an enrolment costs with more and more machines in the inventory", growthNodes},
	{"growth-pending", "what an enrolment costs beside more and more requests that wait", growthPending},
	{"growth-records", "what an enrolment costs beside more and more records", growthRecords},
	{"growth-clusters", "what it costs one controller to serve more and more clusters", growthClusters},
	{"growth-log", "what event logs of several sizes are to the API server", growthLog},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("scale", flag.ContinueOnError)
	only := flags.String("only", "", "the names of the measurements to run, separated by commas; empty for all")
	size := flags.Float64("size", 1, "what numbers of machines, nodes and requests are multiplied by")
	profiles := flags.String("profile", "", "folder for CPU profiles of the controller and the API server, of cost and compare; empty for none")
	plots := flags.String("plots", "", "folder for pictures of the results, of memory, revoked and compare; empty for none")
	flags.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: scale [-only name,...] [-size factor] [-profile folder] [-plots folder]")
		for _, m := range measurements {
			fmt.Fprintf(os.Stderr, "  %-10s %s\n", m.name, m.about)
		}
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	wanted, err := choose(*only)
	if err != nil {
		return err
	}
	b := &bench{size: *size, profiles: *profiles, plots: *plots}
	defer b.close()
	describe()
	var failed []error
	for _, m := range wanted {
		if ctx.Err() != nil {
			break
		}
		began := time.Now()
		fmt.Printf("\n== %s: %s\n", m.name, m.about)
		b.failed = nil
		err := m.run(ctx, b)
		fmt.Printf("(%s took %s)\n", m.name, time.Since(began).Round(time.Second))
		if err := errors.Join(err, errors.Join(b.failed...)); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", m.name, err))
		}
	}
	return errors.Join(errors.Join(failed...), ctx.Err())
}

// choose returns the measurements with these names, in their own order.
func choose(names string) ([]measurement, error) {
	if names == "" {
		return measurements, nil
	}
	wanted := strings.Split(names, ",")
	var chosen []measurement
	for _, m := range measurements {
		if i := slices.Index(wanted, m.name); i >= 0 {
			chosen = append(chosen, m)
			wanted = slices.Delete(wanted, i, i+1)
		}
	}
	if len(wanted) > 0 {
		return nil, fmt.Errorf("there is no measurement %q", wanted[0])
	}
	return chosen, nil
}
