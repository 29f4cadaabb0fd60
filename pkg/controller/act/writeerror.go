// SPDX-License-Identifier: Apache-2.0

package act

import (
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// writeError is the API server's answer to a failed write.
type writeError struct{ err error }

func (e *writeError) Error() string { return e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// asWriteError marks err as the error of a write. It returns nil for nil.
func asWriteError(err error) error {
	if err == nil {
		return nil
	}
	return &writeError{err}
}

// IsWriteRefused reports whether RBAC, an admission plugin or validation refused a write. After a
// conflict or a timeout a retry may succeed, so these do not count.
func IsWriteRefused(err error) bool {
	var write *writeError
	return errors.As(err, &write) &&
		(apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsRequestEntityTooLargeError(err))
}
