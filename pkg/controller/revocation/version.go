// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strconv"

	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
)

// ServerVersion returns a function for Config.Version. Every authenticated user may read the
// version. The HTTP client is optional: the default is made from the config.
func ServerVersion(config *rest.Config, with *http.Client) (func(context.Context) (*version.Info, error), error) {
	var err error
	if with == nil {
		if with, err = rest.HTTPClientFor(config); err != nil {
			return nil, err
		}
	}
	client, err := discovery.NewDiscoveryClientForConfigAndClient(config, with)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) (*version.Info, error) {
		data, err := client.RESTClient().Get().AbsPath("/version").Do(ctx).Raw()
		if err != nil {
			return nil, err
		}
		info := &version.Info{}
		if err := json.Unmarshal(data, info); err != nil {
			return nil, fmt.Errorf("version of the API server: %w", err)
		}
		return info, nil
	}, nil
}

var leadingDigits = regexp.MustCompile(`^[0-9]+`)

// namesCredentials reports whether an API server passes the fingerprint of a requester's
// certificate to admission, as it does since Kubernetes 1.32.
func namesCredentials(info *version.Info) bool {
	number := func(text string) int {
		n, err := strconv.Atoi(leadingDigits.FindString(text)) // some vendors append a "+"
		if err != nil {
			return 0
		}
		return n
	}
	major := number(info.Major)
	return major > 1 || major == 1 && number(info.Minor) >= 32
}
