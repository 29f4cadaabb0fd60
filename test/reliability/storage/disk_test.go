// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// disk is a file system in memory, mounted by FUSE, that promises no more than POSIX does. fsync of
// a file makes its content durable. fsync of a directory makes the names in it durable. Everything
// else may be lost when the power is cut. Its lost method names the power cuts that it can make of
// the calls before one.
type disk struct {
	path string

	mu   sync.Mutex
	root *object
	next uint64
	// pending are the changes of names that no fsync has made durable yet, in their order.
	pending []change
	// calls are the calls that change something, or make it durable, in their order.
	calls []string
	// cutBefore is the number of the call that the power is cut before, from 1. 0 is never.
	cutBefore int
	// cut is closed when the power is cut, and restored when nobody is left who could see it.
	cut, restored chan struct{}
	isCut         bool
	// callers are the threads that wait in calls since the power was cut.
	callers map[uint32]bool
}

// object is a file or a directory.
type object struct {
	fs.Inode
	disk     *disk
	ino      uint64
	name     string // for the list of calls
	dir      bool
	mode     uint32
	modified time.Time
	// content is what processes read. durable is what is left of it after a power cut.
	content, durable []byte
	// entries are the names that processes see. durableEntries are left after a power cut.
	entries, durableEntries map[string]*object
}

// change is one change of names. It becomes durable as a whole.
type change []entry

// entry gives a name in a directory to an object, or removes the name if that is nil.
type entry struct {
	in   *object
	name string
	to   *object
}

// image is what a disk holds: the content of each file by its path. A directory has a nil content.
type image map[string][]byte

// mount returns a disk that holds an image durably. It is unmounted when the test ends, or before.
func mount(t testing.TB, dir string, holds image) *disk {
	t.Helper()
	d := &disk{path: dir, cut: make(chan struct{}), restored: make(chan struct{}), callers: map[uint32]bool{}}
	d.root = d.newObject(true, 0o755)
	d.root.name = "/"
	for _, name := range slices.Sorted(maps.Keys(holds)) { // a directory comes before its files
		content := holds[name]
		o := d.newObject(content == nil, 0o600)
		if o.dir {
			o.mode = 0o700
		}
		o.content, o.durable = slices.Clone(content), slices.Clone(content)
		parent := d.root
		for part := range strings.SplitSeq(path.Dir(name), "/") {
			if part != "." {
				parent = parent.entries[part]
			}
		}
		o.name = path.Base(name)
		parent.entries[o.name], parent.durableEntries[o.name] = o, o
	}
	zero := time.Duration(0)
	options := &fs.Options{EntryTimeout: &zero, AttrTimeout: &zero, NegativeTimeout: &zero}
	options.DirectMountStrict, options.FsName, options.Name = true, "disk", "disk"
	_, err := fs.Mount(dir, d.root, options)
	harness.Must(t, err)
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return d
}

func (d *disk) newObject(dir bool, mode uint32) *object {
	d.next++
	o := &object{disk: d, ino: d.next, dir: dir, mode: mode, modified: time.Now()}
	if dir {
		o.entries, o.durableEntries = map[string]*object{}, map[string]*object{}
	}
	return o
}

// cutPowerBefore has the power cut before the nth call that changes something, from 1.
func (d *disk) cutPowerBefore(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cutBefore = n
}

// changes returns the calls that changed something, in their order.
func (d *disk) changes() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.calls)
}

// powerOff cuts the power now.
func (d *disk) powerOff() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.isCut {
		d.isCut = true
		close(d.cut)
	}
}

// restore ends the calls that wait since the power was cut, with EIO. The processes that made them
// are as good as dead.
func (d *disk) restore() { close(d.restored) }

// unmount removes the disk. No process uses it any more. It does not wait for the FUSE server,
// which goes on as long as a mount namespace has a copy of the mount. Each mount namespace that was
// made meanwhile has a copy.
func (d *disk) unmount(t testing.TB) {
	t.Helper()
	harness.Eventually(t, harness.Soon, "the disk is unmounted", func() bool { return syscall.Unmount(d.path, 0) == nil })
}

// enter begins a call. It returns the function that ends it, or EIO after a power cut. what is
// empty for a call that changes nothing.
func (d *disk) enter(ctx context.Context, what string) (func(), syscall.Errno) {
	d.mu.Lock()
	if !d.isCut && what != "" {
		if len(d.calls)+1 == d.cutBefore {
			d.isCut = true
			close(d.cut)
		} else {
			d.calls = append(d.calls, what)
		}
	}
	if !d.isCut {
		return d.mu.Unlock, 0
	}
	if caller, ok := fuse.FromContext(ctx); ok {
		d.callers[caller.Pid] = true
	}
	d.mu.Unlock()
	<-d.restored // the caller does nothing more
	return nil, syscall.EIO
}

// changeNames changes what processes see, and notes what is not durable yet.
func (d *disk) changeNames(c ...entry) {
	for _, e := range c {
		if e.to == nil {
			delete(e.in.entries, e.name)
		} else {
			e.in.entries[e.name], e.to.name = e.to, e.name
		}
		e.in.modified = time.Now()
	}
	d.pending = append(d.pending, c)
}

// syncNames makes the names in a directory durable. It does not so for the directory's own name.
func (d *disk) syncNames(in *object) {
	var rest []change
	for _, c := range d.pending {
		if !slices.ContainsFunc(c, func(e entry) bool { return e.in == in }) {
			rest = append(rest, c)
			continue
		}
		for _, e := range c {
			apply(e.in.durableEntries, e)
		}
	}
	d.pending = rest
}

func apply(entries map[string]*object, e entry) {
	if e.to == nil {
		delete(entries, e.name)
	} else {
		entries[e.name] = e.to
	}
}

// A loss is one way in which a power cut can leave a disk.
type loss struct {
	name string
	left image
}

func equalImages(a, b image) bool {
	return maps.EqualFunc(a, b, func(a, b []byte) bool { return string(a) == string(b) && (a == nil) == (b == nil) })
}

// losses returns what the disk may hold after a power cut now: the first is what POSIX promises. A
// journal keeps changes of names in their order: any number of the last ones may be lost. Content
// without an fsync may be lost, torn, or null bytes of the right length, each with each. ext4 and
// XFS do that. Equal ones are left out.
func (d *disk) losses() []loss {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []loss
	for kept := range len(d.pending) + 1 {
		for _, content := range []struct {
			name string
			of   func(*object) []byte
		}{
			{"lost", func(o *object) []byte { return o.durable }},
			{"torn", func(o *object) []byte { return o.content[:len(o.content)/2] }},
			{"null", func(o *object) []byte { return make([]byte, len(o.content)) }},
			{"written", func(o *object) []byte { return o.content }},
		} {
			left := image{}
			d.collect(left, "", d.root, d.pending[:kept], func(o *object) []byte {
				if string(o.content) == string(o.durable) {
					return o.durable
				}
				return content.of(o)
			})
			if !slices.ContainsFunc(all, func(l loss) bool { return equalImages(l.left, left) }) {
				all = append(all, loss{fmt.Sprintf("%d of %d names kept, content %s", kept, len(d.pending), content.name), left})
			}
		}
	}
	return all
}

func (d *disk) collect(into image, at string, dir *object, kept []change, content func(*object) []byte) {
	entries := maps.Clone(dir.durableEntries)
	for _, c := range kept {
		for _, e := range c {
			if e.in == dir {
				apply(entries, e)
			}
		}
	}
	for name, o := range entries {
		if into[path.Join(at, name)] = nil; o.dir {
			d.collect(into, path.Join(at, name), o, kept, content)
		} else {
			into[path.Join(at, name)] = append([]byte{}, content(o)...)
		}
	}
}

// The rest is what FUSE asks for.

func (o *object) attr(out *fuse.Attr) {
	out.Ino, out.Mode, out.Nlink, out.Size = o.ino, o.mode|o.kind(), 1, uint64(len(o.content))
	out.Owner = fuse.Owner{Uid: uint32(os.Geteuid()), Gid: uint32(os.Getegid())}
	out.SetTimes(&o.modified, &o.modified, &o.modified)
}

func (o *object) kind() uint32 {
	if o.dir {
		return syscall.S_IFDIR
	}
	return syscall.S_IFREG
}

func (o *object) inode(ctx context.Context, child *object, out *fuse.EntryOut) *fs.Inode {
	child.attr(&out.Attr)
	return o.NewInode(ctx, child, fs.StableAttr{Mode: child.kind(), Ino: child.ino})
}

func (o *object) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	leave, errno := o.disk.enter(ctx, "")
	if errno != 0 {
		return nil, errno
	}
	defer leave()
	child := o.entries[name]
	if child == nil {
		return nil, syscall.ENOENT
	}
	return o.inode(ctx, child, out), 0
}

func (o *object) Getattr(ctx context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	leave, errno := o.disk.enter(ctx, "")
	if errno != 0 {
		return errno
	}
	defer leave()
	o.attr(&out.Attr)
	return 0
}

func (o *object) Setattr(ctx context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	leave, errno := o.disk.enter(ctx, "setattr "+o.name)
	if errno != 0 {
		return errno
	}
	defer leave()
	if mode, ok := in.GetMode(); ok {
		o.mode = mode & 0o7777
	}
	if size, ok := in.GetSize(); ok {
		o.resize(int(size))
	}
	if at, ok := in.GetMTime(); ok {
		o.modified = at
	}
	o.attr(&out.Attr)
	return 0
}

func (o *object) resize(size int) {
	content := make([]byte, size)
	copy(content, o.content)
	o.content, o.modified = content, time.Now()
}

func (o *object) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	leave, errno := o.disk.enter(ctx, "mkdir "+name)
	if errno != 0 {
		return nil, errno
	}
	defer leave()
	child := o.disk.newObject(true, mode&0o7777)
	o.disk.changeNames(entry{o, name, child})
	return o.inode(ctx, child, out), 0
}

func (o *object) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	leave, errno := o.disk.enter(ctx, "create "+name)
	if errno != 0 {
		return nil, nil, 0, errno
	}
	defer leave()
	child := o.disk.newObject(false, mode&0o7777)
	o.disk.changeNames(entry{o, name, child})
	return o.inode(ctx, child, out), handle{flags}, fuse.FOPEN_DIRECT_IO, 0
}

func (o *object) Unlink(ctx context.Context, name string) syscall.Errno {
	leave, errno := o.disk.enter(ctx, "unlink "+name)
	if errno != 0 {
		return errno
	}
	defer leave()
	o.disk.changeNames(entry{o, name, nil})
	return 0
}

func (o *object) Rmdir(ctx context.Context, name string) syscall.Errno {
	leave, errno := o.disk.enter(ctx, "rmdir "+name)
	if errno != 0 {
		return errno
	}
	defer leave()
	if len(o.entries[name].entries) > 0 {
		return syscall.ENOTEMPTY
	}
	o.disk.changeNames(entry{o, name, nil})
	return 0
}

func (o *object) Rename(ctx context.Context, name string, to fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	leave, errno := o.disk.enter(ctx, "rename to "+newName)
	if errno != 0 {
		return errno
	}
	defer leave()
	if flags != 0 {
		return syscall.EINVAL
	}
	o.disk.changeNames(entry{o, name, nil}, entry{to.(*object), newName, o.entries[name]})
	return 0
}

// handle is an open file.
type handle struct{ flags uint32 }

func (o *object) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	what := ""
	if flags&syscall.O_TRUNC != 0 {
		what = "truncate " + o.name
	}
	leave, errno := o.disk.enter(ctx, what)
	if errno != 0 {
		return nil, 0, errno
	}
	defer leave()
	if what != "" {
		o.resize(0)
	}
	return handle{flags}, fuse.FOPEN_DIRECT_IO, 0
}

func (o *object) Read(ctx context.Context, _ fs.FileHandle, into []byte, offset int64) (fuse.ReadResult, syscall.Errno) {
	leave, errno := o.disk.enter(ctx, "")
	if errno != 0 {
		return nil, errno
	}
	defer leave()
	n := copy(into, o.content[min(int(offset), len(o.content)):])
	return fuse.ReadResultData(into[:n]), 0
}

func (o *object) Write(ctx context.Context, file fs.FileHandle, data []byte, offset int64) (uint32, syscall.Errno) {
	leave, errno := o.disk.enter(ctx, "write "+o.name)
	if errno != 0 {
		return 0, errno
	}
	defer leave()
	if file.(handle).flags&syscall.O_APPEND != 0 {
		offset = int64(len(o.content))
	}
	o.resize(max(len(o.content), int(offset)+len(data)))
	copy(o.content[offset:], data)
	return uint32(len(data)), 0
}

func (o *object) Fsync(ctx context.Context, _ fs.FileHandle, _ uint32) syscall.Errno {
	leave, errno := o.disk.enter(ctx, "fsync "+o.name)
	if errno != 0 {
		return errno
	}
	defer leave()
	if o.dir {
		o.disk.syncNames(o)
	} else {
		o.durable = slices.Clone(o.content)
	}
	return 0
}

func (o *object) Flush(context.Context, fs.FileHandle) syscall.Errno { return 0 }

func (o *object) Readdir(ctx context.Context) (fs.DirStream, syscall.Errno) {
	leave, errno := o.disk.enter(ctx, "")
	if errno != 0 {
		return nil, errno
	}
	defer leave()
	var list []fuse.DirEntry
	for _, name := range slices.Sorted(maps.Keys(o.entries)) {
		list = append(list, fuse.DirEntry{Name: name, Mode: o.entries[name].kind(), Ino: o.entries[name].ino})
	}
	return fs.NewListDirStream(list), 0
}
