// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"k8s.io/client-go/rest"
)

// maxBody limits an answer of a workload cluster's API server, in bytes, since its administrator
// may replace it. An honest API server's longest answer is a list of all requests. In a watch, the
// decoder of protobuf limits each event to 16 MiB.
const maxBody = 256 << 20

// maxErrorBody limits the answer of a failed call, which gets into logs.
const maxErrorBody = 16 << 10

// protobuf is the content type of watched kinds. The decoder of JSON does not limit an event.
const protobuf = "application/vnd.kubernetes.protobuf"

// WithBounds returns a connection that limits each answer, drops warnings, and follows no
// redirects.
func WithBounds(connection *rest.Config) *rest.Config {
	connection = rest.CopyConfig(connection)
	connection.WarningHandler = rest.NoWarnings{}
	connection.Wrap(func(next http.RoundTripper) http.RoundTripper { return boundingTransport{next} })
	return connection
}

type boundingTransport struct{ next http.RoundTripper }

// RoundTrip limits the body, and refuses redirects, which no API server sends.
func (g boundingTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := g.next.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	watch := request.URL.Query().Get("watch") == "true"
	refuse := func(format string, a ...any) (*http.Response, error) {
		_ = response.Body.Close() // nothing of it is read
		return nil, fmt.Errorf("the workload cluster "+format, a...)
	}
	switch code := response.StatusCode; {
	case code >= 300 && code < 400:
		return refuse("redirects, with HTTP status %d", code)
	case code >= 400:
		response.Body = &boundedBody{response.Body, maxErrorBody}
	case !watch:
		response.Body = &boundedBody{response.Body, maxBody}
	case !strings.HasPrefix(response.Header.Get("Content-Type"), protobuf):
		return refuse("answers a watch in %.64q", response.Header.Get("Content-Type"))
	}
	return response, nil
}

// boundedBody fails once more than left bytes have been read.
type boundedBody struct {
	io.ReadCloser
	left int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, errors.New("the workload cluster's answer is too long")
	}
	return n, err
}
