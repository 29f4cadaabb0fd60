// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"k8s.io/client-go/rest"
)

// maxBody bounds an answer of a workload cluster's API server, in bytes: its administrator may have put anything in its place. A list of all
// requests is the longest that an honest one gives. Of a watch each event is bounded, by the decoder of protobuf, to 16 MiB.
const maxBody = 256 << 20

// maxErrorBody bounds an answer that says what is wrong: it gets into logs.
const maxErrorBody = 16 << 10

// protobuf is what the kinds that are watched come in. The decoder of JSON does not bound an event.
const protobuf = "application/vnd.kubernetes.protobuf"

// withBounds returns a connection that takes no answer without end, logs nothing that comes beside it, and goes nowhere else.
func withBounds(connection *rest.Config) *rest.Config {
	connection = rest.CopyConfig(connection)
	connection.WarningHandler = rest.NoWarnings{}
	connection.Wrap(func(next http.RoundTripper) http.RoundTripper { return boundingTransport{next} })
	return connection
}

type boundingTransport struct{ next http.RoundTripper }

// RoundTrip bounds the body, and refuses redirects: no API server has any.
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
