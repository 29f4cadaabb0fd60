// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// sensitivity is who may read a file.
type sensitivity int

const (
	secret  sensitivity = iota // no other user may read it
	private                    // other users should not read it
)

// assessFile checks owner and mode of a file that root trusts.
func assessFile(path string, info fs.FileInfo, holds sensitivity) checkup.Result {
	mode := info.Mode().Perm()
	switch {
	case !info.Mode().IsRegular():
		return failure("remove "+path, "%s: is not a regular file", path)
	case trustedfile.Problem(info) != "":
		return failure(trustedfile.Remedy(path), "%s: %s", path, trustedfile.Problem(info))
	case holds == secret && mode&0o044 != 0:
		return failure("chmod 0600 "+path+"; then create a new credential: others may have read this one", "%s: others may read the credential in it (mode %04o)", path, mode)
	case holds == private && mode&0o044 != 0:
		return warning("chmod 0600 "+path, "%s: others may read it (mode %04o)", path, mode)
	}
	return ok("%s: mode %04o", path, mode)
}

func checkConfiguration(_ context.Context, e *examination) checkup.Result {
	var f checkup.Result
	switch _, err := trustedfile.Read(e.ConfigFile); {
	case errors.Is(err, fs.ErrNotExist):
		f = ok("no file %s: flags and defaults", e.ConfigFile)
		if e.isUnconfigured() {
			f = failure("write it (docs/configuration.md), then restart the kubelet: kubelet-authenticator prepare then switches the kubelet over",
				"there is no file %s, so the drop-in %s changes nothing: the kubelet requests its certificates itself, without attestation", e.ConfigFile, e.dropIn())
		}
	case err != nil:
		f = untrustedResult(err)
	default:
		f = ok("%s", e.ConfigFile)
	}
	if errors.Is(e.ConfigErr, fs.ErrPermission) {
		return skipped("%s: %v: the other checks use flags and defaults", e.ConfigFile, errNeedsRoot)
	}
	if e.ConfigErr != nil {
		failed := reason.AsFailure(e.ConfigErr)
		return checkup.Worst(f, failure(failed.Hint, "%v", failed))
	}
	if _, err := e.attestor(); err != nil { // provider auto cannot choose
		failed := reason.AsFailure(err)
		return checkup.Worst(f, failure(failed.Hint, "%v", failed))
	}
	if path := e.Config.MetricsTextfile; path != "" {
		f = checkup.Worst(f, assessTextfile(path))
	}
	return f
}

// assessTextfile checks the directory of the metrics, which the plugin never creates.
func assessTextfile(path string) checkup.Result {
	dir := filepath.Dir(path)
	const remedy = "name a file in the directory that node-exporter has in --collector.textfile.directory"
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return skipped("%s: %v", dir, errNeedsRoot)
	case err != nil:
		return warning(remedy, "metricsTextfile: no metrics are written: %v", err)
	case !info.IsDir():
		return warning(remedy, "metricsTextfile: no metrics are written: %s is not a directory", dir)
	}
	return ok("metrics go to %s", path)
}

// files are the files of the certificate directory.
var files = map[string]sensitivity{
	cache.CurrentFile: secret, cache.PendingFile: secret, cache.BootstrapFile: secret,
	cache.StateFile: private, cache.LockFile: private, cache.LogFile: private,
}

func checkDirectory(_ context.Context, e *examination) checkup.Result {
	path := e.dir.Path()
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return warning("the plugin creates it in its first run", "%s: does not exist", path)
	case errors.Is(err, fs.ErrPermission):
		return skipped("%s: %v", path, errNeedsRoot)
	case err != nil:
		return failure("name another directory with --cert-dir", "%v", err)
	}
	findings := []checkup.Result{ok("%s: mode %04o", path, info.Mode().Perm())}
	if err := e.dir.Check(); err != nil {
		findings = append(findings, failure(fmt.Sprintf("chown root %s; chmod 0700 %[1]s; or name another directory with --cert-dir", path), "%v", err))
	} else if info.Mode().IsDir() && info.Mode().Perm()&0o055 != 0 {
		findings = append(findings, warning("chmod 0700 "+path, "%s: others may list its files (mode %04o)", path, info.Mode().Perm()))
	}
	findings = append(findings, assessParents(path)...)
	entries, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrPermission) {
		return checkup.Worst(append(findings[1:], skipped("%s: %v", path, errNeedsRoot))...)
	}
	if err != nil {
		return checkup.Worst(append(findings, failure("see dmesg for errors of the disk", "%v", err))...)
	}
	return checkup.Worst(append(findings, assessEntries(path, entries)...)...)
}

// untrustedResult returns the result for an error of package trustedfile.
func untrustedResult(err error) checkup.Result {
	var untrusted *trustedfile.Error
	if errors.As(err, &untrusted) {
		return failure(untrusted.Hint, "%v", err)
	}
	return skipped("%v", err)
}

// assessParents fails if others could replace this path in one of its parent folders.
func assessParents(path string) []checkup.Result {
	if err := trustedfile.Check(filepath.Dir(path)); err != nil {
		return []checkup.Result{untrustedResult(fmt.Errorf("%s: %w", path, err))}
	}
	return nil
}

func assessEntries(dir string, entries []os.DirEntry) []checkup.Result {
	var findings []checkup.Result
	var aside []string
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		name, _, isAside := strings.Cut(entry.Name(), ".set-aside-")
		holds, known := files[name]
		if isAside {
			aside = append(aside, entry.Name())
		}
		info, err := os.Lstat(path)
		if !known || isAside || err != nil {
			continue // this program does not read the file
		}
		findings = append(findings, assessFile(path, info, holds))
	}
	if len(aside) > 0 {
		slices.Sort(aside)
		findings = append(findings, warning("see "+filepath.Join(dir, cache.LogFile)+" for why, then remove them", "%s set aside, since this program could not use them: the last is %s", text.Count(len(aside), "file"), aside[len(aside)-1]))
	}
	return findings
}

func checkCertificate(_ context.Context, e *examination) checkup.Result {
	file := e.dir.File(cache.CurrentFile)
	pair, err := e.pair()
	switch {
	case errors.Is(err, errNeedsRoot):
		return skipped("%v", err)
	case errors.Is(err, fs.ErrNotExist):
		return failure("see last-result; a run of the plugin requests one", "%s: there is no certificate yet", file)
	case err != nil:
		return failure("the plugin sets it aside and requests another: see last-result", "%v", err)
	}
	leaf := pair.Leaf
	span := fmt.Sprintf("node %s, valid from %s to %s", pair.NodeName(), leaf.NotBefore.UTC().Format(time.RFC3339), leaf.NotAfter.UTC().Format(time.RFC3339))
	findings := []checkup.Result{ok("%s", span)}
	var unusable *cache.UnusableError
	if err := cache.CheckNodeCertificate(leaf, "", e.Now()); errors.As(err, &unusable) {
		if unusable.Early {
			return warning("check this machine's clock", "%s: by this machine's clock, it is not valid yet", span)
		}
		return failure("the plugin requests another: see last-result", "%s: %v", file, err)
	}
	switch node, err := e.nodeName(); {
	case errors.Is(err, fs.ErrPermission):
		findings = append(findings, skipped("%v: %v", err, errNeedsRoot))
	case err != nil:
		findings = append(findings, warning("set nodeName", "%v", err))
	case node.Name != pair.NodeName() && node.Derived:
		findings = append(findings, warning("set nodeName", "it is for node %s, but this host is called %s", pair.NodeName(), node.Name))
	case node.Name != pair.NodeName():
		findings = append(findings, failure("set nodeName; the plugin then requests another certificate", "it is for node %s, but this is node %s", pair.NodeName(), node.Name))
	}
	if due := nodestate.RenewAt(leaf); e.renews() && nodestate.RenewalFails(due, e.Now()) {
		findings = append(findings, warning("see last-result", "%s: its renewal has been due since %s", span, due.UTC().Format(time.RFC3339)))
	}
	return checkup.Worst(findings...)
}
