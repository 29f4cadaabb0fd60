// SPDX-License-Identifier: Apache-2.0

package container

import (
	"context"
	"fmt"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// PushBase pushes an index of two images without any layer, as static images are laid out, and
// returns it by digest. Images are built on it.
func PushBase(ctx context.Context, reference string) (name.Digest, error) {
	ref, err := name.ParseReference(reference)
	if err != nil {
		return name.Digest{}, err
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range []string{"amd64", "arm64"} {
		img, err := mutate.ConfigFile(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON),
			&v1.ConfigFile{OS: "linux", Architecture: arch, RootFS: v1.RootFS{Type: "layers"}})
		if err != nil {
			return name.Digest{}, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: img, Descriptor: v1.Descriptor{MediaType: types.OCIManifestSchema1, Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	if err := remote.WriteIndex(ref, index, remote.WithContext(ctx)); err != nil {
		return name.Digest{}, fmt.Errorf("push the base: %w", err)
	}
	hash, err := index.Digest()
	return ref.Context().Digest(hash.String()), err
}
