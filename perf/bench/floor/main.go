// SPDX-License-Identifier: Apache-2.0

// floor is what the plugin's valid path is measured against: a Go program that reads a file and
// prints it.
package main

import "os"

func main() {
	data, err := os.ReadFile(os.Args[1]) //nolint:gosec // G703: its purpose
	if err != nil {
		os.Exit(1)
	}
	if _, err := os.Stdout.Write(data); err != nil {
		os.Exit(1)
	}
}
