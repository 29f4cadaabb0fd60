// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	leaseName = "node-attestation-controller"
	keySecret = "node-attestation-controller-key"
	// tokenSeconds is for how long a controller's token is valid: a pod's is renewed by the
	// kubelet.
	tokenSeconds = 6 * 3600
	// restartPause is how long the kubelet's place is taken by nobody.
	restartPause = time.Second
)

// replica is one process of the controller in a control group of its own. It is started again where
// it ends by itself, as the kubelet does.
type replica struct {
	name  string
	group *testbed.MemoryGroup // nil without root

	mu         sync.Mutex // guards what follows
	controller *controllerprocess.Controller
	wanted     bool
	ends       []string // how it ended by itself
}

// startReplicas starts two, as the manifests have them.
func (c *campaign) startReplicas() {
	c.t.Helper()
	container, err := controllerprocess.ReadContainer(module)
	harness.Must(c.t, err)
	binary := filepath.Join(c.dir, "node-attestation-controller")
	harness.Must(c.t, controllerprocess.Build(c.ctx, module, binary))
	seconds := int64(tokenSeconds)
	token, err := c.Client().CoreV1().ServiceAccounts(controllerprocess.Namespace).CreateToken(c.ctx, controllerprocess.Account,
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}}, metav1.CreateOptions{})
	harness.Must(c.t, err)
	for _, name := range []string{"a", "b"} {
		r := &replica{name: name}
		if os.Geteuid() == 0 {
			r.group, err = testbed.NewMemoryGroup(container.Memory)
			harness.Must(c.t, err)
			c.t.Cleanup(func() { harness.Must(c.t, r.group.Remove()) })
		} else {
			c.log.say("WITHOUT A LIMIT ON MEMORY: that needs root")
		}
		r.controller, err = controllerprocess.New(controllerprocess.Options{
			ControlPlane: c.ControlPlane, Dir: c.t.TempDir(), Binary: binary, Env: container.Env(container.Memory), Memory: r.group,
			Kubeconfig: c.Kubeconfig(testbed.TokenUser(token.Status.Token)), Args: []string{"--leader-identity=pod-" + name},
			Configure: func(settings *config.Config) {
				settings.Inventory = config.Inventory{}
				for part := range c.inventories {
					settings.Inventory.ConfigMaps = append(settings.Inventory.ConfigMaps, config.InventoryConfigMap{Name: inventoryName(part), Key: controllerprocess.InventoryKey})
				}
			},
		})
		harness.Must(c.t, err)
		c.replicas = append(c.replicas, r)
		harness.Must(c.t, r.start(c.ctx))
		c.wait.Go(func() { r.keep(c.ctx) })
		c.t.Cleanup(func() {
			if err := r.kill(); err != nil {
				c.t.Logf("replica %s ended by itself: %v", r.name, err)
			}
		})
	}
	for _, r := range c.replicas {
		harness.Must(c.t, r.controller.Ready(c.ctx))
	}
}

func (r *replica) start(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wanted = true
	return r.controller.Start(ctx)
}

// kill ends it as a crash does, and it stays away.
func (r *replica) kill() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wanted = false
	return r.controller.Kill()
}

// stop ends it as a pod is ended.
func (r *replica) stop() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wanted = false
	return r.controller.Stop()
}

// keep starts it again whenever it has ended by itself.
func (r *replica) keep(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(restartPause):
		}
		r.mu.Lock()
		if r.wanted {
			select {
			case <-r.controller.Process().Done():
				r.ends = append(r.ends, fmt.Sprintf("%s: %v", time.Now().Format(time.TimeOnly), r.controller.Process().Err()))
				if err := r.controller.Start(ctx); err != nil {
					r.ends = append(r.ends, err.Error())
				}
			default:
			}
		}
		r.mu.Unlock()
	}
}

func (r *replica) logTail() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return "replica " + r.name + ": " + r.controller.LogTail()
}

// memory is the resident set of its process, in bytes: 0 while it does not run.
func (r *replica) memory() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.controller.Process().PID()))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kilobytes, _ := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			return kilobytes << 10
		}
	}
	return 0
}

// leader returns the replica that the Lease names, nil if that is unknown.
func (c *campaign) leader() *replica {
	lease, err := c.Client().CoordinationV1().Leases(controllerprocess.Namespace).Get(c.ctx, leaseName, metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil {
		return nil
	}
	for _, r := range c.replicas {
		if *lease.Spec.HolderIdentity == "pod-"+r.name {
			return r
		}
	}
	return nil
}

// checkMemory checks that the kernel has killed no replica, and that memory is flat.
func (c *campaign) checkMemory() {
	for _, r := range c.replicas {
		if r.group == nil {
			continue
		}
		killed, err := r.group.Killed()
		harness.Must(c.t, err)
		peak, err := r.group.Peak()
		harness.Must(c.t, err)
		c.log.say("replica %s: killed by the kernel %d times, its group had %d MiB at most", r.name, killed, peak>>20)
		if killed > 0 {
			c.t.Errorf("replica %s was killed by the kernel %d times", r.name, killed)
		}
		r.mu.Lock()
		for _, end := range r.ends {
			first, _, _ := strings.Cut(end, "\n")
			c.log.say("replica %s ended by itself at %s", r.name, first)
			if !strings.Contains(end, "leader election lost") {
				c.log.say("%s", end)
			}
		}
		r.mu.Unlock()
	}
	c.log.say("resident memory of a replica: %d MiB after the warm-up, %d at the end, %d at most", c.log.warm>>20, c.log.end>>20, c.log.most.Load()>>20)
	if allowed := c.log.warm + c.log.warm/4 + 32<<20; c.size.bounds && c.log.end > allowed {
		c.t.Errorf("the memory is not flat: more than %d MiB", allowed>>20)
	}
}
