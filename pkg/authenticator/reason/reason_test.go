// SPDX-License-Identifier: Apache-2.0

package reason_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

var update = flag.Bool("update", false, "write what is generated from this package's tables into docs/")

func TestReasonsAreNumberedOnce(t *testing.T) {
	codes, names, next := map[int]reason.Reason{}, map[reason.Reason]bool{}, 10
	for _, info := range reason.All() {
		if info.Reason == reason.CertificateDue {
			next = 40 // the codes of the command status start again
		}
		switch {
		case info.Code == 0:
			t.Errorf("%s: 0 means that a credential was printed", info.Reason)
		case info.Code == 2:
			t.Errorf("%s: 2 is what the Go runtime exits with after a crash", info.Reason)
		case info.Code < 0 || info.Code > 125:
			t.Errorf("%s: %d means something else to a shell", info.Reason, info.Code)
		case codes[info.Code] != "":
			t.Errorf("%d is both %s and %s", info.Code, codes[info.Code], info.Reason)
		case info.Code >= 10 && info.Code != next:
			t.Errorf("%s: %d, want %d: in order and without a gap", info.Reason, info.Code, next)
		}
		if info.Code >= 10 {
			next = info.Code + 1
		}
		if names[info.Reason] {
			t.Errorf("%s is there twice", info.Reason)
		}
		codes[info.Code], names[info.Reason] = info.Reason, true
		if got := info.Reason.Code(); got != info.Code {
			t.Errorf("%s: Code returns %d, want %d", info.Reason, got, info.Code)
		}
		if !strings.HasSuffix(info.Meaning, ".") || strings.ContainsAny(info.Meaning, "|\n") {
			t.Errorf("%s: %q is not a sentence for the table", info.Reason, info.Meaning)
		}
	}
	if reason.Unexpected.Code() != 1 || reason.Usage.Code() != 3 || reason.Reason("Nonsense").Code() != 1 {
		t.Error("1 is for what has no name, 3 for the command line")
	}
}

// Codes reach dashboards: they stay as they were published.
func TestPublishedCodesDoNotChange(t *testing.T) {
	for why, code := range map[reason.Reason]int{
		"Unexpected": 1, "Usage": 3,
		"Configuration": 10, "ExecAPI": 11, "DirectoryRefused": 12, "WorkerUnavailable": 13, "TPMAbsent": 14, "TPMError": 15,
		"AttestationFailed": 16, "NoBootstrapCredential": 17, "BootstrapCredentialRefused": 18, "APIUnreachable": 19, "APIRefused": 20,
		"RequestDenied": 21, "RequestFailed": 22, "WaitingForSigner": 23, "CertificateUnusable": 24, "ClockWrong": 25,
		"APIUntrusted": 26, "DirectoryNotWritable": 27,
	} {
		if got := why.Code(); got != code {
			t.Errorf("%s has become %d, was %d", why, got, code)
		}
	}
}

func TestEveryReasonIsInTheTable(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "reason.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var declared []string
	for _, decl := range file.Decls {
		group, ok := decl.(*ast.GenDecl)
		if !ok || group.Tok != token.CONST {
			continue
		}
		for _, spec := range group.Specs {
			value := spec.(*ast.ValueSpec)
			if kind, ok := value.Type.(*ast.Ident); !ok || kind.Name != "Reason" {
				continue
			}
			literal, err := strconv.Unquote(value.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			declared = append(declared, literal)
		}
	}
	var listed []string
	for _, info := range reason.All() {
		listed = append(listed, string(info.Reason))
	}
	slices.Sort(declared)
	slices.Sort(listed)
	if len(declared) < 20 || !slices.Equal(declared, listed) {
		t.Errorf("declared: %q\nin the table: %q", declared, listed)
	}
}

const exitCodes = "../../../docs/node.md"

// docs/node.md is Reasons() for people. To write it: go test ./pkg/authenticator/reason -run
// ExitCodes -update.
func TestExitCodesAreDocumented(t *testing.T) {
	const begin, end = "<!-- exit codes -->\n", "<!-- /exit codes -->\n"
	var table strings.Builder
	table.WriteString("| code | name | meaning |\n| --- | --- | --- |\n")
	for _, info := range reason.All() {
		_, _ = fmt.Fprintf(&table, "| %d | %s | %s |\n", info.Code, info.Reason, info.Meaning)
	}
	page, err := os.ReadFile(exitCodes)
	if err != nil {
		t.Fatal(err)
	}
	before, remainder, ok := strings.Cut(string(page), begin)
	have, after, ok2 := strings.Cut(remainder, end)
	if !ok || !ok2 || strings.Contains(after, begin) {
		t.Fatalf("%s: the table stands once between %q and %q", exitCodes, begin, end)
	}
	if have == table.String() {
		return
	}
	if !*update {
		t.Fatalf("%s is not what the program does; have\n%s\nwant\n%s", exitCodes, have, table.String())
	}
	if err := os.WriteFile(exitCodes, []byte(before+begin+table.String()+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestAsFailure(t *testing.T) {
	own := reason.TPMAbsent.Failure("hint", errors.New("no TPM"))
	for name, c := range map[string]struct {
		err  error
		want reason.Reason
	}{
		"a Failure":             {own, reason.TPMAbsent},
		"a Failure inside":      {fmt.Errorf("worker: %w", own), reason.TPMAbsent},
		"a foreign directory":   {fmt.Errorf("x: %w", &cache.ForeignDirError{Path: "/x", Problem: "is a file"}), reason.DirectoryRefused},
		"a full disk":           {fmt.Errorf("x: %w", &cache.WriteError{Path: "/x", Err: io.ErrShortWrite}), reason.DirectoryNotWritable},
		"the lock":              {fmt.Errorf("x: %w", cache.ErrLocked), reason.WorkerUnavailable},
		"a bad certificate":     {fmt.Errorf("x: %w", &cache.UnusableError{Problem: "it is a CA certificate"}), reason.CertificateUnusable},
		"an early certificate":  {fmt.Errorf("x: %w", &cache.UnusableError{Problem: "it is not valid yet", Clock: true}), reason.ClockWrong},
		"what nobody has named": {errors.New("x"), reason.Unexpected},
	} {
		if got := reason.AsFailure(c.err); got.Reason != c.want || got.Err == nil || c.want == reason.TPMAbsent && got != own {
			t.Errorf("%s: %s, want %s", name, got.Reason, c.want)
		}
	}
}

// What the certificate directory's file system refuses has a hint of its own.
func TestWriteErrorsHaveTheirHint(t *testing.T) {
	for number, says := range map[syscall.Errno]string{
		syscall.ENOSPC: "free space", syscall.EDQUOT: "quota", syscall.EROFS: "read-write", syscall.EACCES: "run this as root", syscall.EPERM: "run this as root",
		syscall.ENOLCK: "no locks", syscall.ENOSYS: "no locks", syscall.EOPNOTSUPP: "no locks", syscall.EMFILE: "LimitNOFILE=", syscall.ENFILE: "fs.file-max",
		syscall.EIO: "kernel's log", syscall.EISDIR: "free space on the disk",
	} {
		got := reason.AsFailure(fmt.Errorf("x: %w", &cache.WriteError{Path: "/x", Err: &fs.PathError{Op: "flock", Path: "/x", Err: number}}))
		if got.Reason != reason.DirectoryNotWritable || !strings.Contains(got.Hint, says) {
			t.Errorf("%v: %s, hint %q", number, got.Reason, got.Hint)
		}
		if another := strings.Contains(got.Hint, "--cert-dir"); another == (number == syscall.EMFILE || number == syscall.ENFILE) {
			t.Errorf("%v: hint %q", number, got.Hint)
		}
	}
}

// callAPI returns a client's error with that server, which ClassifyAPIError has to classify.
func callAPI(t *testing.T, server string, ca []byte) error {
	t.Helper()
	client, err := csr.NewClient(&rest.Config{Host: server, TLSClientConfig: rest.TLSClientConfig{CAData: ca}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	object := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "node-csr-x"}}
	if _, err = client.Create(ctx, object, true); err == nil {
		t.Fatal("the call succeeded")
	}
	return err
}

func TestAnswersOfTheAPIServerAreSorted(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		handler http.Handler
		want    reason.Reason
		says    string
	}{
		"401":                    {plugintest.AnswerStatus(401, metav1.StatusReasonUnauthorized, "Unauthorized"), reason.BootstrapRefused, "whose"},
		"403":                    {plugintest.AnswerStatus(403, metav1.StatusReasonForbidden, "certificatesigningrequests is forbidden: User \"x\" cannot create"), reason.APIRefused, "cannot create"},
		"403, in many lines":     {plugintest.AnswerStatus(403, metav1.StatusReasonForbidden, "admission webhook:\n- no\n- no\n"), reason.APIRefused, "whose"},
		"403, at length":         {plugintest.AnswerStatus(403, metav1.StatusReasonForbidden, strings.Repeat("no! ", 10_000)), reason.APIRefused, "no!"},
		"403, with escapes":      {plugintest.AnswerStatus(403, metav1.StatusReasonForbidden, "\x1b]0;owned\x07no"), reason.APIRefused, "no"},
		"403 of a proxy":         {plugintest.AnswerPage(403), reason.APIRefused, ""},
		"404":                    {plugintest.AnswerStatus(404, metav1.StatusReasonNotFound, "the server could not find the requested resource"), reason.APIRefused, ""},
		"404 of a web server":    {plugintest.AnswerPage(404), reason.APIRefused, ""},
		"413":                    {plugintest.AnswerStatus(413, metav1.StatusReasonRequestEntityTooLarge, "too large"), reason.APIRefused, ""},
		"422":                    {plugintest.AnswerStatus(422, metav1.StatusReasonInvalid, "CertificateSigningRequest \"x\" is invalid: [spec.usages: no,\nspec.request: no]"), reason.APIRefused, "spec.request"},
		"400":                    {plugintest.AnswerStatus(400, metav1.StatusReasonBadRequest, "no"), reason.APIRefused, ""},
		"500":                    {plugintest.AnswerStatus(500, metav1.StatusReasonInternalError, "etcd:\nleader changed"), reason.APIUnreachable, "leader changed"},
		"502 of a load balancer": {plugintest.AnswerPage(502), reason.APIUnreachable, ""},
		"200, but not an object": {http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>\nwelcome\n</html>") }), reason.APIUnreachable, ""},
		"no answer":              {http.HandlerFunc(plugintest.Hang), reason.APIUnreachable, "no answer in time"},
		"hangs up":               {http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }), reason.APIUnreachable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, ca := plugintest.TLSServer(t, c.handler, nil)
			failure := plugintest.WantFailure(t, reason.ClassifyAPIError(callAPI(t, server.URL, ca), "whose"), c.want)
			if !strings.Contains(failure.Error(), c.says) {
				t.Errorf("it does not say %q: %v", c.says, failure)
			}
			if failure.Hint == "" {
				t.Error("nothing is said about what can be done")
			}
		})
	}
}

func TestConnectionsThatFailAreSorted(t *testing.T) {
	t.Parallel()
	certificate := func(change func(*x509.Certificate)) (func(*httptest.Server), []byte) {
		template := &x509.Certificate{
			Subject: pkix.Name{CommonName: "kube-apiserver"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, IsCA: true, BasicConstraintsValid: true,
		}
		change(template)
		_, certificate, key := plugintest.NewCertificate(t, template)
		pair, err := tls.X509KeyPair(certificate, key)
		if err != nil {
			t.Fatal(err)
		}
		return func(s *httptest.Server) {
			s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
		}, certificate
	}
	answer := plugintest.AnswerStatus(401, metav1.StatusReasonUnauthorized, "reached")
	for name, c := range map[string]struct {
		change func(*x509.Certificate)
		ca     []byte // nil: the server's own
		want   reason.Reason
	}{
		"reached":       {change: func(*x509.Certificate) {}, want: reason.BootstrapRefused},
		"another CA":    {change: func(*x509.Certificate) {}, ca: plugintest.NewCA(t), want: reason.APIUntrusted},
		"another name":  {change: func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 1)} }, want: reason.APIUntrusted},
		"no server's":   {change: func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }, want: reason.APIUntrusted},
		"expired":       {change: func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }, want: reason.APIUntrusted},
		"not yet valid": {change: func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) }, want: reason.APIUntrusted},
		"the clock is at 1970": {change: func(c *x509.Certificate) {
			c.NotBefore = time.Now().Add(20 * 365 * 24 * time.Hour)
			c.NotAfter = c.NotBefore.Add(time.Hour)
		}, want: reason.APIUntrusted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			start, own := certificate(c.change)
			server, _ := plugintest.TLSServer(t, answer, start)
			ca := c.ca
			if ca == nil {
				ca = own
			}
			_ = plugintest.WantFailure(t, reason.ClassifyAPIError(callAPI(t, server.URL, ca), "whose"), c.want)
		})
	}
	t.Run("nobody listens", func(t *testing.T) {
		t.Parallel()
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		address := "https://" + listener.Addr().String()
		if err := listener.Close(); err != nil {
			t.Fatal(err)
		}
		failure := plugintest.WantFailure(t, reason.ClassifyAPIError(callAPI(t, address, plugintest.NewCA(t)), "whose"), reason.APIUnreachable)
		if !strings.Contains(failure.Error(), "refused") || !strings.Contains(failure.Error(), address) {
			t.Errorf("it does not say who refused: %v", failure)
		}
	})
	t.Run("no TLS", func(t *testing.T) {
		t.Parallel()
		server := httptest.NewServer(answer)
		t.Cleanup(server.Close)
		_ = plugintest.WantFailure(t, reason.ClassifyAPIError(callAPI(t, strings.Replace(server.URL, "http:", "https:", 1), plugintest.NewCA(t)), "whose"), reason.APIUnreachable)
	})
	t.Run("no such name", func(t *testing.T) {
		t.Parallel()
		_ = plugintest.WantFailure(t, reason.ClassifyAPIError(callAPI(t, "https://kube-apiserver.invalid:6443", plugintest.NewCA(t)), "whose"), reason.APIUnreachable)
	})
}

// A password in the server's URL must not end in a log.
func TestFailureDoesNotShowAPassword(t *testing.T) {
	t.Parallel()
	err := callAPI(t, "https://user:hunter2@127.0.0.1:1", plugintest.NewCA(t))
	for _, text := range []string{reason.ClassifyAPIError(err, "whose").Error(), reason.ClassifyAPIError(errors.Join(err, bytes.ErrTooLarge), "whose").Error()} {
		if strings.Contains(text, "hunter2") {
			t.Errorf("it does: %s", text)
		}
	}
}

// What an API server or a controller says about a revoked certificate, or a suspended machine.
func TestRevokedAndSuspended(t *testing.T) {
	denied := func(message string) http.HandlerFunc {
		return plugintest.AnswerStatus(403, "Forbidden", "certificatesigningrequests.certificates.k8s.io is forbidden: ValidatingAdmissionPolicy 'node-attestation-revoked-01' with binding 'b' denied request: "+message)
	}
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		want    reason.Reason
	}{
		"revoked":   {denied(attestation.MessageRevoked), reason.CertificateRevoked},
		"suspended": {denied(attestation.MessageSuspended + ": stolen"), reason.MachineSuspended},
		"neither":   {denied("no"), reason.APIRefused},
		"not a 403": {plugintest.AnswerStatus(422, "Invalid", attestation.MessageSuspended), reason.APIRefused},
	} {
		t.Run(name, func(t *testing.T) {
			server, ca := plugintest.TLSServer(t, c.handler, nil)
			failure := plugintest.WantFailure(t, reason.ClassifyAPIError(callAPI(t, server.URL, ca), "whose"), c.want)
			if failure.Hint == "" || c.want != reason.APIRefused && failure.Reason.Info().BackOff != reason.BackOffLater {
				t.Errorf("hint %q", failure.Hint)
			}
		})
	}
}
