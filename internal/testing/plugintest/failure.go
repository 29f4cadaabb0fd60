// SPDX-License-Identifier: Apache-2.0

package plugintest

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
)

// WantFailure returns the Failure in err if it has that reason and its text fits on one line of a
// log.
func WantFailure(t testing.TB, err error, want reason.Reason) *reason.Failure {
	t.Helper()
	var failure *reason.Failure
	if !errors.As(err, &failure) {
		t.Fatalf("got %v, want a Failure with reason %s", err, want)
	}
	if failure.Reason != want {
		t.Errorf("reason %s, want %s: %v", failure.Reason, want, err)
	}
	for what, text := range map[string]string{"error": failure.Error(), "hint": failure.Hint} {
		if problem := NotOneLine(text); problem != "" {
			t.Errorf("the %s %s: %.200q", what, problem, text)
		}
	}
	return failure
}

// MustFail is WantFailure for those who want no more of it.
func MustFail(t testing.TB, err error, want reason.Reason) {
	t.Helper()
	_ = WantFailure(t, err, want)
}

// AnswerStatus answers with a Status object, as an API server does.
func AnswerStatus(code int, why metav1.StatusReason, message string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
			Status:   metav1.StatusFailure, Code: int32(code), Reason: why, Message: message, //nolint:gosec // a status of HTTP
		})
	}
}

// AnswerPage answers with HTML, as a proxy between a node and the API server does.
func AnswerPage(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(code)
		_, _ = io.WriteString(w, "<html>\n<head>\n<title>No</title>\n</head>\n<body>\n\x1b[2J"+strings.Repeat("<p>Ask your administrator.</p>\n", 100)+"</body>\n</html>\n")
	}
}
