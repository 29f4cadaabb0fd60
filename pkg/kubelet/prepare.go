// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// Setup has the paths of one machine.
type Setup struct {
	// Config is this program's configuration file. Without one, Prepare changes nothing.
	Config string
	// Invalid says that this file exists and is invalid. The caller then fails, so the kubelet does
	// not start, unless another program wrote the kubeconfig.
	Invalid bool
	// Kubeconfig and Bootstrap are the kubelet's two files, KubeconfigFile and BootstrapFile.
	Kubeconfig, Bootstrap string
	// Static is the bootstrap kubeconfig that the configuration names, or empty. It is used in
	// place: never copied, never deleted.
	Static string
	// KubeletConfig is the kubelet's ConfigFile. Until it exists, Static alone does not count:
	// kubeadm refuses to join a machine that has a kubelet.conf.
	KubeletConfig string
	// EnvFile and Manifests are EnvFile and ManifestsDir.
	EnvFile, Manifests string
	// Certs is the certificate directory.
	Certs cache.Dir
	// Exec is the user of a kubelet.conf that is written.
	Exec Exec
}

// PlainPath reports whether a path is absolute and has only letters, digits and . _ -, so that
// neither systemd nor a shell interprets it. Each run of the plugin calls it: a regular expression
// would take longer to compile than all other checks.
func PlainPath(path string) bool {
	const plain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
	names, absolute := strings.CutPrefix(path, "/")
	if !absolute {
		return false
	}
	for name := range strings.SplitSeq(names, "/") {
		if name == "" || strings.Trim(name, plain) != "" {
			return false
		}
	}
	return true
}

// Check returns an error unless all paths are absolute, and plain where systemd and the kubelet's
// command line take them as they are. Prepare relies on that.
func (s Setup) Check() error {
	for name, path := range map[string]string{"kubeletKubeconfig": s.Kubeconfig, "kubeletBootstrapKubeconfig": s.Bootstrap} {
		if !PlainPath(path) {
			return fmt.Errorf("%s %.253q: must be an absolute path of letters, digits and . _ - only", name, path)
		}
	}
	for name, path := range map[string]string{
		"certDir": s.Certs.Path(), "bootstrapKubeconfig": s.Static, "--config": s.Config, "--env-file": s.EnvFile, "--manifests": s.Manifests, "--kubelet-config": s.KubeletConfig,
	} {
		if !filepath.IsAbs(path) && (name != "bootstrapKubeconfig" || path != "") {
			return fmt.Errorf("%s %.253q: must be an absolute path", name, path)
		}
	}
	return nil
}

// Preparation is the result of Prepare.
type Preparation struct {
	// Enabled is set if the kubelet is to start with this program as its credential. Foreign is
	// set if it is not, because its kubeconfig belongs to another.
	Enabled, Foreign bool
	// First says that the kubelet should not start before there is a certificate. The node never
	// had one of this cluster, and is not a control plane.
	First bool
	// Cluster is the one that the kubelet's kubeconfig names.
	Cluster cache.Origin
	// Problems are what failed. The kubelet can start all the same.
	Problems []error
}

// preparation is one Prepare.
type preparation struct {
	Setup
	Preparation
	say        func(string)
	kubeconfig Kubeconfig
	bootstrap  Kubeconfig
	// fresh is set if bootstrap can be used, and has not been copied, used and deleted before.
	fresh bool
}

// Prepare adapts the kubelet's files to this program, or leaves them alone. It reports each
// decision in a line. It does not touch files that are right already. It can be killed at any
// point: the next one makes the same decisions. The error is an *UnpreparedError.
func Prepare(s Setup, say func(string)) (Preparation, error) {
	p := &preparation{Setup: s, say: say}
	why, err := p.whyNot()
	if err != nil {
		return p.Preparation, &UnpreparedError{err}
	}
	if why != "" {
		p.disable(why)
		return p.Preparation, nil
	}
	p.keepCopy()
	settled, err := p.settleKubeconfig()
	if err != nil {
		return p.Preparation, &UnpreparedError{err}
	}
	if !settled {
		p.disable(fmt.Sprintf("there is no %s, and no bootstrap kubeconfig that names a cluster", s.Kubeconfig))
		return p.Preparation, nil
	}
	p.Enabled = true
	p.First = p.isFirst() && !exists(filepath.Join(s.Manifests, ServerManifest))
	if err := p.enable(); err != nil {
		return p.Preparation, &UnpreparedError{err}
	}
	return p.Preparation, nil
}

// UnpreparedError says that the kubelet must not start: without its environment file it would
// request a certificate itself, and overwrite its kubeconfig.
type UnpreparedError struct{ Err error }

func (e *UnpreparedError) Error() string { return "the kubelet must not start: " + e.Err.Error() }
func (e *UnpreparedError) Unwrap() error { return e.Err }

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// whyNot returns why this program leaves the machine alone, empty if it does not. The error says
// that this cannot be decided.
func (p *preparation) whyNot() (string, error) {
	if !exists(p.Config) {
		return "there is no configuration file " + p.Config, nil
	}
	p.kubeconfig = ReadKubeconfig(p.Kubeconfig, p.Exec.Command)
	var untrusted *trustedfile.Error
	if errors.As(p.kubeconfig.Problem, &untrusted) && untrusted.Path != p.Kubeconfig && p.Certs.EverInstalled() {
		// The kubelet uses the file in such a folder all the same: a node that has joined goes on.
		p.Problems = append(p.Problems, untrusted)
		p.kubeconfig = readKubeconfigAt(p.Kubeconfig, p.Exec.Command)
	}
	if p.kubeconfig.unknown {
		return "", p.kubeconfig.Problem
	}
	p.bootstrap = ReadKubeconfig(p.Bootstrap, p.Exec.Command)
	if p.kubeconfig.Kind == Unreadable && (p.isJoined() || p.hasStatic()) {
		return "", p.kubeconfig.Problem // it may be ours, torn or with another mode
	}
	if p.kubeconfig.Kind != Missing && p.kubeconfig.Kind != Ours {
		p.Foreign = true
		return (&ForeignError{p.kubeconfig}).Error(), nil
	}
	switch {
	case p.isJoined() || p.hasStatic():
		return "", nil
	case p.Static != "" && exists(p.Static):
		return fmt.Sprintf("there is no %s yet, nor a bootstrap kubeconfig but %s", p.KubeletConfig, p.Static), nil
	}
	return "there is neither a bootstrap kubeconfig nor a certificate yet", nil
}

// hasStatic reports whether the static credential counts. It does not on a machine that kubeadm has
// not joined yet, or has reset.
func (p *preparation) hasStatic() bool {
	return p.Static != "" && exists(p.Static) && exists(p.KubeletConfig)
}

// isJoined reports whether the machine is being joined to a cluster, or has been.
func (p *preparation) isJoined() bool {
	return p.bootstrap.Kind != Missing || exists(p.Certs.File(cache.BootstrapFile)) || p.Certs.EverInstalled()
}

// disable makes the kubelet start as kubeadm configures it.
func (p *preparation) disable(why string) {
	if p.Invalid && !p.Foreign {
		p.say(why + ", and the configuration file is invalid: the kubelet does not start")
	} else {
		p.say(why + ": the kubelet starts without kubelet-authenticator")
	}
	if err := os.Remove(p.EnvFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.Problems = append(p.Problems, fmt.Errorf("remove: %w", err))
	}
}

// enable writes the environment file last: if the process is killed before, the unit fails.
func (p *preparation) enable() error {
	dir, name := cache.At(filepath.Dir(p.EnvFile)), filepath.Base(p.EnvFile)
	content := Environment(p.Kubeconfig)
	if err := dir.Create(); err != nil {
		return err
	}
	dir.CleanFile(name)
	if before, _, err := dir.Read(name); err == nil && bytes.Equal(before, content) {
		return nil
	}
	if err := dir.Write(name, content); err != nil {
		return err
	}
	p.say("wrote " + p.EnvFile + ": the kubelet starts with kubelet-authenticator")
	return nil
}

// copyLockWait is how long a copy waits for a worker that writes into the certificate directory.
const copyLockWait = 2 * time.Second

// keepCopy copies kubeadm's bootstrap kubeconfig into the certificate directory, since kubeadm
// deletes its own as soon as the kubelet is healthy. It does not copy one that was copied and used
// before.
func (p *preparation) keepCopy() {
	if p.bootstrap.Kind == Missing {
		return
	}
	p.fresh = p.bootstrap.usable()
	copied, err := copyOf(p.bootstrap)
	if p.bootstrap.Kind == Ours || p.bootstrap.Kind == bypassed || p.bootstrap.Kind == otherExec {
		p.say(err.Error()) // kubeadm must be configured to join through an exec plugin
		return
	}
	if err != nil {
		p.Problems = append(p.Problems, fmt.Errorf("no copy is kept of the bootstrap kubeconfig: %w", err))
		return
	}
	if state, err := p.Certs.State(); err == nil && state.SpentBootstrap == Fingerprint(copied) {
		p.fresh = false
		return
	}
	if p.Static != "" {
		return // it alone is asked with
	}
	path := p.Certs.File(cache.BootstrapFile)
	before, exposed, err := p.Certs.Read(cache.BootstrapFile)
	switch {
	case err == nil && !IsCopy(before):
		p.say(path + ": is not a copy that this program made, and is not changed")
		return
	case err == nil && !exposed && bytes.Equal(before, copied):
		return
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		p.Problems = append(p.Problems, fmt.Errorf("no copy is kept of the bootstrap kubeconfig: %w", err))
		return
	}
	if err := p.writeCopy(copied); err != nil {
		p.Problems = append(p.Problems, err)
		return
	}
	p.say(fmt.Sprintf("copied %s to %s", p.Bootstrap, path))
}

// writeCopy holds the lock, since a worker removes half-written files. If a worker does not release
// the lock, it writes all the same: the credential must not be lost.
func (p *preparation) writeCopy(copied []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), copyLockWait)
	defer cancel()
	lock, err := p.Certs.WaitLock(ctx)
	switch {
	case err == nil:
		defer lock.Unlock()
		lock.Clean() // half of a copy holds a credential, too
	case !errors.Is(err, cache.ErrLocked):
		return err
	}
	return p.Certs.Write(cache.BootstrapFile, copied)
}

// settleKubeconfig writes the kubelet's kubeconfig if there is none, or if kubeadm has since joined
// the machine to another cluster. For the same cluster it keeps a server that an operator has set.
// It returns false if there is none, and nothing names a cluster. A certificate alone names none:
// the machine may have left that cluster with "kubeadm reset". An error says that the kubelet would
// join without this program.
func (p *preparation) settleKubeconfig() (bool, error) {
	p.Cluster = p.kubeconfig.Cluster
	wanted, known := p.findCluster()
	switch {
	case p.kubeconfig.Kind == Missing && !known:
		return false, errors.Join(p.bootstrap.Problem, p.bootstrap.ClusterProblem)
	case p.kubeconfig.Kind == Ours && (!p.fresh || !known || p.kubeconfig.ClusterProblem == nil && p.kubeconfig.Cluster.SameCluster(wanted)):
		p.mendCommand()
		return true, nil
	}
	content, err := RenderKubeconfig(wanted, p.Exec)
	if err == nil {
		_, err = WriteKubeconfig(p.Kubeconfig, content, p.Exec.Command)
	}
	if err != nil && p.kubeconfig.Kind == Ours {
		p.Problems = append(p.Problems, err)
		return true, nil
	}
	if err != nil {
		return false, err
	}
	p.Cluster = wanted
	p.say(fmt.Sprintf("wrote %s, for the cluster at %.253s", p.Kubeconfig, wanted.Server))
	return true, nil
}

// mendCommand names this program in our kubelet.conf if an upgrade has removed its command, which
// was the target of a link then.
func (p *preparation) mendCommand() {
	gone := p.kubeconfig.Command
	if !p.kubeconfig.Alone || !filepath.IsAbs(gone) || gone == p.Exec.Command || exists(gone) {
		return
	}
	content, err := p.kubeconfig.withCommand(p.Exec.Command)
	if err == nil {
		_, err = WriteKubeconfig(p.Kubeconfig, content, p.Exec.Command)
	}
	if err != nil {
		p.Problems = append(p.Problems, err)
		return
	}
	p.say(fmt.Sprintf("wrote %s, with %s: there is no %.253s any more", p.Kubeconfig, p.Exec.Command, gone))
}

// findCluster returns the cluster to join. kubeadm's file comes first, then the operator's, then
// the copy.
func (p *preparation) findCluster() (cache.Origin, bool) {
	if p.bootstrap.usable() {
		return p.bootstrap.Cluster, true
	}
	for _, path := range []string{p.Static, p.Certs.File(cache.BootstrapFile)} {
		if path == p.Static && !p.hasStatic() {
			continue
		}
		if k := ReadKubeconfig(path, p.Exec.Command); k.usable() {
			return k.Cluster, true
		}
	}
	return cache.Origin{}, false
}

// usable reports whether the file names a cluster.
func (k *Kubeconfig) usable() bool {
	return k.Kind != Missing && k.Kind != Unreadable && k.ClusterProblem == nil
}

// isFirst reports whether the node never had a certificate, or is being joined to another cluster
// than the one of its certificate.
func (p *preparation) isFirst() bool {
	if !p.Certs.EverInstalled() {
		return true
	}
	pair, err := p.Certs.Current()
	return p.fresh && err == nil && pair.Origin != nil && !pair.Origin.SameCluster(p.Cluster)
}
