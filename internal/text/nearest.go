// SPDX-License-Identifier: Apache-2.0

package text

import "strings"

// farthest is how many letters a mistyped word may be off.
const farthest = 2

// leastPrefix is how many letters of a word say which one is meant.
const leastPrefix = 3

// Nearest returns the candidate that a mistyped word most likely means, or one that begins with the
// word. It returns "" if there is none. Case does not count. Of two candidates that are equally
// near, it returns the first.
func Nearest(word string, candidates []string) string {
	nearest, least := "", min(farthest, len(word)/2)+1
	for _, candidate := range candidates {
		if d := distance(strings.ToLower(word), strings.ToLower(candidate)); d < least {
			nearest, least = candidate, d
		}
	}
	if nearest != "" || len(word) < leastPrefix {
		return nearest
	}
	for _, candidate := range candidates {
		if strings.HasPrefix(strings.ToLower(candidate), strings.ToLower(word)) {
			return candidate
		}
	}
	return ""
}

// DidYouMean returns what follows an error about a mistyped word, empty if no candidate is near.
// prefix goes before the candidate, such as the "--" of a flag.
func DidYouMean(word, prefix string, candidates []string) string {
	if nearest := Nearest(word, candidates); nearest != "" {
		return "; did you mean " + prefix + nearest + "?"
	}
	return ""
}

// distance is the Levenshtein distance: how many bytes to insert, delete or replace.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
