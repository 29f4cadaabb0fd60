// SPDX-License-Identifier: Apache-2.0

// Package container runs the controller's image as a container runtime does, as far as the program
// can see.
package container

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// enter starts the program like a container runtime: from the read-only image alone, as the image's
// user, and with the image's environment. The program has no privileges and cannot get any. $1 is
// the root, $2 the user, the rest the program and its arguments. There is less than in a container:
// no /proc, no /dev, no /sys, no /etc/resolv.conf. The shell is the first process of its namespace.
// So both die with the tests, although the change of user cleared the program's Pdeathsig.
const enter = `
mount --bind "$1" "$1"
mount -o remount,bind,ro,nosuid,nodev "$1"
root=$1 user=$2
shift 2
setpriv --no-new-privs --bounding-set=-all,+sys_chroot,+setuid,+setgid chroot --userspec="$user" --groups= "$root" "$@" &
wait $!
`

// Container is an image, unpacked as a container's root.
type Container struct {
	// Root is the folder with what the image's layers have.
	Root string

	user, program string
	env           []string
}

// Of returns the container of an image that is unpacked in a folder.
func Of(img v1.Image, root string) (*Container, error) {
	cf, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	return &Container{Root: root, user: cf.Config.User, program: cf.Config.Entrypoint[0], env: cf.Config.Env}, nil
}

// Mount puts files where a pod has volumes, readable by its group (fsGroup) only.
func (c *Container) Mount(folder string, files map[string][]byte) error {
	dir := filepath.Join(c.Root, folder)
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // G301: as in a pod
		return err
	}
	var uid, gid int
	if _, err := fmt.Sscanf(c.user, "%d:%d", &uid, &gid); err != nil {
		return fmt.Errorf("user %q: %w", c.user, err)
	}
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path+".new", content, 0o640); err != nil { //nolint:gosec // G306: as in a pod
			return err
		}
		if err := os.Chown(path+".new", 0, gid); err != nil {
			return err
		}
		if err := os.Rename(path+".new", path); err != nil { // a program that reads it again sees the whole content
			return err
		}
	}
	return nil
}

const accountFolder = "/var/run/secrets/kubernetes.io/serviceaccount"

// MountAccount gives the container what a pod has of its service account, and returns the
// environment that says where the API server is.
func (c *Container) MountAccount(ctx context.Context, cp *testbed.ControlPlane, namespace, account string) (env []string, err error) {
	token, err := cp.Client().CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("make a token for service account %s/%s: %w", namespace, account, err)
	}
	err = c.Mount(accountFolder, map[string][]byte{"token": []byte(token.Status.Token), "ca.crt": cp.ServerCA(), "namespace": []byte(namespace)})
	if err != nil {
		return nil, err
	}
	server, err := url.Parse(cp.ServerURL())
	if err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(server.Host)
	return []string{"KUBERNETES_SERVICE_HOST=" + host, "KUBERNETES_SERVICE_PORT=" + port}, err
}

// Command is that which starts the program in there.
func (c *Container) Command(env []string, args ...string) []string {
	command := []string{"unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "sh", "-ec", enter, "sh", c.Root, c.user}
	// The tools around it need their PATH. The program starts no others.
	outside := append([]string{"env", "-i"}, slices.Concat(c.env, env, []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"})...)
	return slices.Concat(outside, command, []string{c.program}, args)
}
