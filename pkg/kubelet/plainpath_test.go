// SPDX-License-Identifier: Apache-2.0

package kubelet

import "testing"

func TestPlainPath(t *testing.T) {
	for path, want := range map[string]bool{
		"/a": true, "/etc/kubernetes/kubelet.conf": true, "/A-z_0.9/..": true,
		"": false, "/": false, "a": false, "a/b": false, "//a": false, "/a//b": false, "/a/": false,
		"/a b": false, "/a\n": false, "/a%h": false, "/a$b": false, "/a\"": false, "/é": false, "/a\x00b": false,
	} {
		if got := PlainPath(path); got != want {
			t.Errorf("%q: %t", path, got)
		}
	}
}
