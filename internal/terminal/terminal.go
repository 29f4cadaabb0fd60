// SPDX-License-Identifier: Apache-2.0

// Package terminal says whether a file is a terminal, and asks the person there.
package terminal

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"golang.org/x/term"
)

// maxAnswer limits the answer, in bytes.
const maxAnswer = 64

var (
	// ErrNobody says that standard input is not a terminal, so nobody can answer.
	ErrNobody = errors.New("standard input is not a terminal, so nobody can confirm it")
	// ErrDeclined says that the answer was not yes.
	ErrDeclined = errors.New("not confirmed")
)

// The escape sequences of colours.
const (
	Red    = "\x1b[31m"
	Green  = "\x1b[32m"
	Yellow = "\x1b[33m"
	Plain  = "\x1b[0m"
)

// Is reports whether a file is a terminal. Other character devices, such as /dev/null, are none.
func Is(file any) bool {
	f, ok := file.(interface{ Fd() uintptr })
	return ok && term.IsTerminal(int(f.Fd()))
}

// Colors reports whether a file may have colours (no-color.org).
func Colors(file any, getenv func(string) string) bool {
	return Is(file) && getenv("NO_COLOR") == "" && getenv("TERM") != "dumb"
}

// Confirm asks a question on out and reads the answer from in. It returns nil only if the answer is
// "yes", otherwise ErrNobody, ErrDeclined, or the error of ctx.
func Confirm(ctx context.Context, in io.Reader, out io.Writer, question string) error {
	if !Is(in) {
		return ErrNobody
	}
	if _, err := fmt.Fprintf(out, "%s Type yes: ", question); err != nil {
		return err
	}
	answers := make(chan string, 1)
	go func() {
		// no answer is no
		answer, _ := bufio.NewReader(io.LimitReader(in, maxAnswer)).ReadString('\n')
		answers <- answer
	}()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case answer := <-answers:
		if strings.TrimSpace(answer) != "yes" {
			return ErrDeclined
		}
		return nil
	}
}
