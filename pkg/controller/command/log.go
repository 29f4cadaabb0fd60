// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"github.com/go-logr/logr"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// logFormat is the value of --logging-format. The zero value is text.
type logFormat string

const (
	logText logFormat = "text"
	logJSON logFormat = "json"
)

// maxText bounds each text in an entry, in bytes. A stack trace fits.
const maxText = 32 << 10

// String implements pflag.Value, as do Type and Set.
func (f *logFormat) String() string { return string(*f) }

// Type is the kind of the flag's value in --help.
func (*logFormat) Type() string { return "format" }

// Set sets the value of the flag.
func (f *logFormat) Set(value string) error {
	switch *f = logFormat(value); *f {
	case logText, logJSON:
		return nil
	}
	return errors.New("must be text or json")
}

// apply makes klog, client-go, controller-runtime and the standard logger log in this format.
// verbosity is the flag -v. Peers choose parts of many entries, so each entry is one line of
// visible characters, and texts are cut to maxText. A workload cluster's API server chooses the
// number of its warnings, so client-go does not log them.
func (f *logFormat) apply(output io.Writer, verbosity int) {
	output = text.EntryWriter(output)
	rest.SetDefaultWarningHandlerWithContext(rest.NoWarnings{})
	// net/http uses the standard logger, for example for a panic of a handler.
	klog.CopyStandardLogTo("INFO")
	if *f == logJSON {
		options := &slog.HandlerOptions{Level: slog.Level(-verbosity), ReplaceAttr: replaceAttr}
		klog.SetSlogLogger(slog.New(slog.NewJSONHandler(output, options)))
		return
	}
	config := textlogger.NewConfig(textlogger.Output(output), textlogger.Verbosity(verbosity))
	klog.SetLoggerWithOptions(logr.New(quotingSink{textlogger.NewLogger(config).GetSink()}), klog.ContextualLogger(true))
}

// quotingSink is a sink for klog's text format that makes klog quote each value. klog itself does
// not escape names of objects and values of several lines. Such a value could forge other fields.
type quotingSink struct{ logr.LogSink }

func (s quotingSink) Init(info logr.RuntimeInfo) {
	info.CallDepth++ // for the methods below
	s.LogSink.Init(info)
}

func (s quotingSink) WithCallDepth(depth int) logr.LogSink {
	return quotingSink{s.LogSink.(logr.CallDepthLogSink).WithCallDepth(depth)}
}

func (s quotingSink) WithName(name string) logr.LogSink {
	return quotingSink{s.LogSink.WithName(name)}
}

func (s quotingSink) WithValues(fields ...any) logr.LogSink {
	return quotingSink{s.LogSink.WithValues(quoted(fields)...)}
}

func (s quotingSink) Info(level int, message string, fields ...any) {
	s.LogSink.Info(level, text.Cut(message, maxText), quoted(fields)...)
}

func (s quotingSink) Error(err error, message string, fields ...any) {
	if err != nil {
		err = errors.New(short(err.Error()))
	}
	s.LogSink.Error(err, text.Cut(message, maxText), quoted(fields)...)
}

// quoted returns the fields with each text as one line, because klog quotes such a text. klog
// writes values of other types as JSON.
func quoted(fields []any) []any {
	safe := slices.Clone(fields)
	for i, field := range safe {
		switch field.(type) {
		case string, []byte, error, fmt.Stringer:
			safe[i] = short(fmt.Sprintf("%s", field))
		}
	}
	return safe
}

// short returns a text as a value of the text format.
func short(s string) string { return text.Escape(text.Cut(s, maxText)) }

// replaceAttr names three levels: DEBUG for each verbosity above 0, INFO and ERROR. Durations are
// text, as in the other format. It cuts long texts.
func replaceAttr(groups []string, a slog.Attr) slog.Attr {
	if level, ok := a.Value.Any().(slog.Level); ok && len(groups) == 0 && a.Key == slog.LevelKey && level < slog.LevelInfo {
		return slog.String(a.Key, slog.LevelDebug.String())
	}
	if a.Value.Kind() == slog.KindDuration {
		return slog.String(a.Key, a.Value.Duration().String())
	}
	switch v := a.Value.Any().(type) {
	case string, error, fmt.Stringer:
		if s := fmt.Sprint(v); len(s) > maxText {
			return slog.String(a.Key, text.Cut(s, maxText))
		}
	}
	return a
}
