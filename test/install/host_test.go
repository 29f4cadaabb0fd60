// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/container"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	hostName     = "control-plane"
	hostInterval = 50 * time.Millisecond
	// remount is the time after which a changed ConfigMap is in a pod. A kubelet takes a minute.
	remount = time.Second
	// grace is how long a pod may take to end.
	grace = 20 * time.Second
)

// host is scheduler and kubelet of the control plane's node, for the pods of Deployments. It pulls
// their image, and gives them the files, the environment and the arguments of their spec. It
// reports them as ready when their readiness probe succeeds. Only their network is the host's: each
// is given ports of its own.
type host struct {
	*testbed.ControlPlane
	dir string

	mu   sync.Mutex
	pods map[string]*pod // by UID
	errs []error
}

type pod struct {
	container       *container.Container
	process         *testbed.Process
	health, metrics *testbed.Port
	mounted         time.Time
}

// startHost makes the node, and runs its pods until the test ends.
func startHost(t *testing.T, cp *testbed.ControlPlane) *host {
	t.Helper()
	h := &host{ControlPlane: cp, dir: t.TempDir(), pods: map[string]*pod{}}
	// The container's user has to get to its root.
	for dir := h.dir; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		harness.Must(t, os.Chmod(dir, 0o755))
	}
	_, err := cp.Client().CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: hostName},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			if err := h.sync(ctx); err != nil && ctx.Err() == nil {
				h.mu.Lock()
				h.errs = append(h.errs, err)
				h.mu.Unlock()
			}
			time.Sleep(hostInterval)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		for _, p := range h.pods {
			if t.Failed() {
				t.Log(p.process.LogTail())
			}
			if err := p.end(); err != nil {
				t.Error(err)
			}
		}
		if t.Failed() && len(h.errs) > 0 {
			t.Log(h.errs[len(h.errs)-1])
		}
	})
	return h
}

// sync looks at each pod once.
func (h *host) sync(ctx context.Context) error {
	list, err := h.Client().CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var errs []error
	for i := range list.Items {
		object := &list.Items[i]
		running := h.pods[string(object.UID)]
		switch {
		case object.DeletionTimestamp != nil:
			err = h.remove(ctx, object, running)
		case object.Spec.NodeName == "":
			err = h.Client().CoreV1().Pods(object.Namespace).Bind(ctx, &corev1.Binding{
				ObjectMeta: metav1.ObjectMeta{Name: object.Name, UID: object.UID}, Target: corev1.ObjectReference{Kind: "Node", Name: hostName},
			}, metav1.CreateOptions{})
		case running == nil:
			err = h.start(ctx, object)
		default:
			err = h.report(ctx, object, running)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (h *host) start(ctx context.Context, object *corev1.Pod) error {
	spec := object.Spec.Containers[0]
	p := &pod{}
	var err error
	if p.container, err = pull(spec.Image, filepath.Join(h.dir, object.Name)); err != nil {
		return err
	}
	if p.health, err = testbed.TakePort(); err != nil {
		return err
	}
	if p.metrics, err = testbed.TakePort(); err != nil {
		return err
	}
	if err := h.mount(ctx, object, p); err != nil {
		return err
	}
	env, err := p.container.MountAccount(ctx, h.ControlPlane, object.Namespace, object.Spec.ServiceAccountName)
	if err != nil {
		return err
	}
	values := map[string]string{}
	for _, variable := range spec.Env {
		value := variable.Value
		if from := variable.ValueFrom; from != nil && from.FieldRef != nil {
			value = map[string]string{"metadata.name": object.Name, "metadata.uid": string(object.UID)}[from.FieldRef.FieldPath]
		} else if from != nil && from.ResourceFieldRef != nil {
			value = fmt.Sprint(spec.Resources.Limits.Memory().Value() >> 20)
		}
		values[variable.Name] = expand(value, values)
		env = append(env, variable.Name+"="+values[variable.Name])
	}
	var args []string
	for _, arg := range spec.Args {
		args = append(args, expand(arg, values))
	}
	command := p.container.Command(env, args...)
	if p.process, err = testbed.StartProcess(testbed.Command{Path: command[0], Args: command[1:], LogFile: filepath.Join(h.dir, object.Name+".log")}); err != nil {
		return err
	}
	h.pods[string(object.UID)] = p
	return nil
}

// mount puts the ConfigMaps of a pod into its container.
func (h *host) mount(ctx context.Context, object *corev1.Pod, p *pod) error {
	p.mounted = time.Now()
	for _, mount := range object.Spec.Containers[0].VolumeMounts {
		for _, volume := range object.Spec.Volumes {
			if volume.Name != mount.Name || volume.ConfigMap == nil {
				continue
			}
			content, err := h.Client().CoreV1().ConfigMaps(object.Namespace).Get(ctx, volume.ConfigMap.Name, metav1.GetOptions{})
			if err != nil {
				return err // a kubelet waits for it, too
			}
			files := map[string][]byte{}
			for name, text := range content.Data {
				files[name] = []byte(text + fmt.Sprintf("\nmetricsBindAddress: %q\nhealthBindAddress: %q\n", p.metrics.Addr(), p.health.Addr()))
			}
			if err := p.container.Mount(mount.MountPath, files); err != nil {
				return err
			}
		}
	}
	return nil
}

// expand replaces $(NAME) as a kubelet does.
func expand(text string, values map[string]string) string {
	for name, value := range values {
		text = strings.ReplaceAll(text, "$("+name+")", value)
	}
	return text
}

// pull unpacks an image into a folder.
func pull(image, root string) (*container.Container, error) {
	ref, err := name.ParseReference(image)
	if err != nil {
		return nil, err
	}
	img, err := remote.Image(ref)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, err
	}
	layers := mutate.Extract(img)
	cmd := exec.Command("tar", "--extract", "--no-same-owner", "--directory="+root)
	cmd.Stdin = layers
	out, err := cmd.CombinedOutput()
	if err := errors.Join(err, layers.Close()); err != nil {
		return nil, fmt.Errorf("unpack %s: %w: %s", image, err, out)
	}
	return container.Of(img, root)
}

// report says what has become of a pod: ready, waiting, or started again after it ended.
func (h *host) report(ctx context.Context, object *corev1.Pod, p *pod) error {
	select {
	case <-p.process.Done():
		delete(h.pods, string(object.UID)) // and it is started again
		p.freePorts()
		return nil
	default:
	}
	if time.Since(p.mounted) > remount {
		if err := h.mount(ctx, object, p); err != nil {
			return err
		}
	}
	ready := corev1.ConditionFalse
	probe := object.Spec.Containers[0].ReadinessProbe.HTTPGet
	if answer, err := http.Get("http://" + p.health.Addr() + probe.Path); err == nil { //nolint:noctx // it is on this machine
		_ = answer.Body.Close()
		if answer.StatusCode == http.StatusOK {
			ready = corev1.ConditionTrue
		}
	}
	for _, c := range object.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == ready {
			return nil
		}
	}
	object.Status.Phase = corev1.PodRunning
	object.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready, LastTransitionTime: metav1.Now()}}
	_, err := h.Client().CoreV1().Pods(object.Namespace).UpdateStatus(ctx, object, metav1.UpdateOptions{})
	return err
}

// remove ends a pod that is being deleted.
func (h *host) remove(ctx context.Context, object *corev1.Pod, p *pod) error {
	if p != nil {
		if err := p.end(); err != nil {
			return err
		}
		delete(h.pods, string(object.UID))
	}
	now := int64(0)
	err := h.Client().CoreV1().Pods(object.Namespace).Delete(ctx, object.Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// end ends the container as a pod is ended.
func (p *pod) end() error {
	_ = syscall.Kill(-p.process.PID(), syscall.SIGTERM)
	select {
	case <-p.process.Done():
	case <-time.After(grace):
		return errors.Join(fmt.Errorf("a pod has not ended\n%s", p.process.LogTail()), p.process.Kill())
	}
	p.freePorts()
	return nil
}

func (p *pod) freePorts() {
	p.health.Free()
	p.metrics.Free()
}
