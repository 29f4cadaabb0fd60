// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	authorizationv1 "k8s.io/api/authorization/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/lastgood"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

const (
	// maxQuestion bounds a question, in bytes. A requester controls its length: a label selector of
	// 90 kB makes one of over 1 MiB.
	maxQuestion = 64 << 10
	// requestTimeout bounds the time to read a question and to write the answer. An API server
	// waits half a second (packaging/authorizer/authorization.yaml).
	requestTimeout = 5 * time.Second
	// idleTimeout is longer than API servers keep an idle connection, so they close it.
	idleTimeout = 5 * time.Minute
	// stopTimeout bounds the time for pending questions when the server stops.
	stopTimeout = 2 * time.Second
	// maxPEM bounds each file for TLS. filesInterval is the time between two reads.
	maxPEM, filesInterval = 1 << 20, 10 * time.Second
)

// ServeHTTP answers a SubjectAccessReview. It never answers with an HTTP error, because API
// servers repeat the question then. What cannot be read gets no opinion.
//
// A question over maxQuestion is denied, or a revoked certificate could read with a long selector.
// API servers ask only about nodes and tokens of a node (packaging/authorizer/authorization.yaml),
// and a kubelet sends no long selector.
func (a *Authorizer) ServeHTTP(answer http.ResponseWriter, request *http.Request) {
	review, err := readReview(answer, request)
	_, tooLong := errors.AsType[*bounded.TooLongError](err)
	switch {
	case err == nil:
		review.Status = a.Authorize(request.Context(), review.Spec)
	case tooLong:
		review = &authorizationv1.SubjectAccessReview{Status: deny(Decision{Deny, TooLong})}
		a.Metrics.Denied(string(TooLong), false)
		a.reportUnread("denied: a question of an API server is too long", err)
	default:
		review = &authorizationv1.SubjectAccessReview{}
		a.reportUnread("cannot read a question of an API server: it gets no opinion", err)
	}
	review.APIVersion, review.Kind = authorizationv1.SchemeGroupVersion.String(), kind
	review.Spec = authorizationv1.SubjectAccessReviewSpec{} // the API server has it
	answer.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(answer).Encode(review) // fails only if the client has gone
}

// reportUnread logs once in a while that a question could not be read.
func (a *Authorizer) reportUnread(message string, err error) {
	if cause := text.Line(err.Error(), telemetry.MaxLogged); a.reported.MarkReported(message, cause, a.Now(), reportInterval) {
		a.Log.Error(nil, message, "cause", cause)
	}
}

const kind = "SubjectAccessReview"

// readReview reads a question. A newer API server may send fields that this program does not know.
// They only narrow a request, so they are ignored.
func readReview(answer http.ResponseWriter, request *http.Request) (*authorizationv1.SubjectAccessReview, error) {
	if request.Method != http.MethodPost {
		return nil, fmt.Errorf("the method is %.16q, not POST", request.Method)
	}
	data, err := bounded.ReadAll(http.MaxBytesReader(answer, request.Body, maxQuestion+1), maxQuestion)
	if err != nil {
		return nil, err
	}
	review := &authorizationv1.SubjectAccessReview{}
	if err := json.Unmarshal(data, review); err != nil {
		return nil, err
	}
	if version := authorizationv1.SchemeGroupVersion.String(); review.APIVersion != version || review.Kind != kind {
		return nil, fmt.Errorf("it is %.64q of %.64q, not %s of %s", review.Kind, review.APIVersion, kind, version)
	}
	return review, nil
}

// TLSFiles are the files of the server. They are read again when they change.
type TLSFiles struct {
	// Certificate and Key are the server's. ClientCA verifies the certificates of API servers.
	Certificate, Key, ClientCA string
}

// Serve answers API servers on the listener until ctx ends. Only clients with a certificate of the
// CA get an answer.
func (a *Authorizer) Serve(ctx context.Context, listener net.Listener, files TLSFiles) error {
	configure := a.tlsConfig(files)
	if _, err := configure(nil); err != nil {
		return err
	}
	server := &http.Server{
		Handler: a, ErrorLog: slog.NewLogLogger(logr.ToSlogHandler(a.Log), slog.LevelInfo),
		ReadTimeout: requestTimeout, WriteTimeout: requestTimeout, IdleTimeout: idleTimeout,
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: configure},
	}
	failed := make(chan error, 1)
	go func() { failed <- server.ServeTLS(listener, "", "") }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	stopping, stop := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer stop()
	if server.Shutdown(stopping) != nil { // a client that sends nothing
		_ = server.Close()
	}
	return nil
}

// tlsConfig returns a function that reads the files, and returns the configuration of a connection.
// While a file is invalid or missing, its last valid content is used.
func (a *Authorizer) tlsConfig(files TLSFiles) func(*tls.ClientHelloInfo) (*tls.Config, error) {
	certificate := &lastgood.File[*tls.Certificate]{
		Name: "serving certificate", Path: files.Certificate, MaxSize: maxPEM, MaxAge: filesInterval,
		Reparse: true, // the key may be written after the certificate
		Parse: func(chain []byte) (*tls.Certificate, error) {
			key, err := bounded.ReadFile(files.Key, maxPEM)
			if err != nil {
				return nil, err
			}
			pair, err := tls.X509KeyPair(chain, key)
			return &pair, err
		},
	}
	clientCA := &lastgood.File[*x509.CertPool]{Name: "client CA", Path: files.ClientCA, MaxSize: maxPEM, MaxAge: filesInterval, Parse: parseCA}
	return func(*tls.ClientHelloInfo) (*tls.Config, error) {
		pair, certificateErr := certificate.Get(a.Now())
		pool, caErr := clientCA.Get(a.Now())
		if err := errors.Join(certificateErr, caErr); err != nil {
			return nil, err
		}
		return &tls.Config{
			MinVersion: tls.VersionTLS13, NextProtos: []string{"h2", "http/1.1"},
			Certificates: []tls.Certificate{*pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
		}, nil
	}
}

func parseCA(data []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		return nil, errors.New("it has no certificate in PEM")
	}
	return pool, nil
}
