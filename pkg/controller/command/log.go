// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"io"
	"log/slog"

	"k8s.io/klog/v2"
)

// logFormat is the value of --logging-format. The zero value is text.
type logFormat string

const (
	logText logFormat = "text"
	logJSON logFormat = "json"
)

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

// apply makes klog log in this format, and with it client-go and controller-runtime. verbosity is
// the flag -v, which klog's own text format reads itself.
func (f *logFormat) apply(output io.Writer, verbosity int) {
	if *f == logJSON {
		options := &slog.HandlerOptions{Level: slog.Level(-verbosity), ReplaceAttr: replaceAttr}
		klog.SetSlogLogger(slog.New(slog.NewJSONHandler(output, options)))
	}
}

// replaceAttr names three levels: DEBUG for each verbosity above 0, INFO and ERROR. Durations are
// text, as in the other format.
func replaceAttr(groups []string, a slog.Attr) slog.Attr {
	if level, ok := a.Value.Any().(slog.Level); ok && len(groups) == 0 && a.Key == slog.LevelKey && level < slog.LevelInfo {
		return slog.String(a.Key, slog.LevelDebug.String())
	}
	if a.Value.Kind() == slog.KindDuration {
		return slog.String(a.Key, a.Value.Duration().String())
	}
	return a
}
