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

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// Setup is where everything is on one machine.
type Setup struct {
	// Config is this program's configuration file. Where there is none, the machine is left as it is.
	Config string
	// Kubeconfig and Bootstrap are the kubelet's two files, KubeconfigFile and BootstrapFile.
	Kubeconfig, Bootstrap string
	// Static is the bootstrap kubeconfig that the configuration names, empty if it names none. It is used where it is: never copied, never deleted.
	Static string
	// KubeletConfig is the kubelet's ConfigFile. Until it is there Static alone does not count: kubeadm refuses to join a machine with a kubelet.conf.
	KubeletConfig string
	// EnvFile and Manifests are EnvFile and ManifestsDir.
	EnvFile, Manifests string
	// Certs is the certificate directory.
	Certs cache.Dir
	// Exec is the user of a kubelet.conf that is written.
	Exec Exec
}

// PlainPath reports whether a path is absolute and of letters, digits and . _ - only, so that neither systemd nor a shell reads anything into
// it. Each run of the plugin asks: a regular expression would take longer to compile than all else that is checked.
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

// Check returns an error unless all paths are absolute, and plain where systemd and the kubelet's command line are to take them as they are. Prepare
// trusts in that.
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

// Preparation is what Prepare came to.
type Preparation struct {
	// Enabled is set if the kubelet is to be started with this program as its credential. Otherwise Foreign is set if its kubeconfig is somebody else's.
	Enabled, Foreign bool
	// First is set if the kubelet should not be started before there is a certificate: the node has never had one of this cluster, and it is
	// not a control plane.
	First bool
	// Cluster is the one that the kubelet's kubeconfig leads to.
	Cluster cache.Origin
	// Problems are what could not be done. The kubelet can be started all the same.
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

// Prepare makes the kubelet's files fit for this program, or leaves them alone, and says each decision in a line. What is right already is not
// touched. It can be killed at any point: the next one finds the same decisions. The error is an *UnpreparedError.
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
		p.disable(fmt.Sprintf("there is no %s, and no bootstrap kubeconfig that says which cluster to join", s.Kubeconfig))
		return p.Preparation, nil
	}
	p.Enabled = true
	p.First = p.isFirst() && !exists(filepath.Join(s.Manifests, ServerManifest))
	if err := p.enable(); err != nil {
		return p.Preparation, &UnpreparedError{err}
	}
	return p.Preparation, nil
}

// UnpreparedError says that the kubelet must not be started: without its environment file it would fetch a certificate by itself, and write over its
// kubeconfig.
type UnpreparedError struct{ Err error }

func (e *UnpreparedError) Error() string { return "the kubelet must not start: " + e.Err.Error() }
func (e *UnpreparedError) Unwrap() error { return e.Err }

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// whyNot returns why this machine is none of this program's, empty if it is. The error says that it cannot be told.
func (p *preparation) whyNot() (string, error) {
	if !exists(p.Config) {
		return "there is no configuration file " + p.Config, nil
	}
	p.kubeconfig = ReadKubeconfig(p.Kubeconfig, p.Exec.Command)
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

// hasStatic reports whether the static credential counts: not on a machine that kubeadm is yet to join, or has reset.
func (p *preparation) hasStatic() bool {
	return p.Static != "" && exists(p.Static) && exists(p.KubeletConfig)
}

// isJoined reports whether the machine is being joined to a cluster, or has been.
func (p *preparation) isJoined() bool {
	return p.bootstrap.Kind != Missing || exists(p.Certs.File(cache.BootstrapFile)) || p.Certs.EverInstalled()
}

// disable has the kubelet start as kubeadm has it.
func (p *preparation) disable(why string) {
	p.say(why + ": the kubelet starts without kubelet-authenticator")
	if err := os.Remove(p.EnvFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.Problems = append(p.Problems, fmt.Errorf("remove: %w", err))
	}
}

// enable writes the environment file, last: whoever is killed before has the unit fail.
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

// keepCopy copies kubeadm's bootstrap kubeconfig into the certificate directory, unless that very one has been copied and has served already: kubeadm
// deletes its own as soon as the kubelet is healthy.
func (p *preparation) keepCopy() {
	if p.bootstrap.Kind == Missing {
		return
	}
	p.fresh = p.bootstrap.usable()
	copied, err := copyOf(p.bootstrap)
	if p.bootstrap.Kind == Ours || p.bootstrap.Kind == Bypassed || p.bootstrap.Kind == OtherExec {
		p.say(err.Error()) // kubeadm is told to join through an exec plugin
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
		p.say(path + ": is not a copy of this program's, and left alone")
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

// writeCopy holds the lock, since a worker removes half-written files. One that does not let go is no reason to lose the credential.
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

// settleKubeconfig writes the kubelet's kubeconfig where there is none, or where kubeadm has since joined the machine to another cluster; for the
// same one it keeps the server that an operator has put there. It returns false where there is none and nothing that names a cluster: a certificate
// alone does not, since the machine may have left that cluster with "kubeadm reset". An error says that the kubelet would join without us.
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

// mendCommand names this program in a kubelet.conf of ours whose command an upgrade has taken away: it was written as the file that a link led to then.
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

// findCluster returns the cluster to join: kubeadm's word first, then the operator's, then the copy.
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

// usable reports whether the file leads to a cluster.
func (k *Kubeconfig) usable() bool {
	return k.Kind != Missing && k.Kind != Unreadable && k.ClusterProblem == nil
}

// isFirst reports whether the node has never had a certificate, or is being joined to another cluster than the one its certificate came from.
func (p *preparation) isFirst() bool {
	if !p.Certs.EverInstalled() {
		return true
	}
	pair, err := p.Certs.Current()
	return p.fresh && err == nil && pair.Origin != nil && !pair.Origin.SameCluster(p.Cluster)
}
