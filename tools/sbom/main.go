// SPDX-License-Identifier: Apache-2.0

// sbom writes the bill of materials of one release artifact, as CycloneDX. It lists the Go binary,
// and the modules in the binary's build information. The same input gives the same bytes.
package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

func main() {
	if err := run(os.Args[1:], os.Getenv); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

// release is what is described.
type release struct {
	artifact, binary string // files
	name, version    string // of the product
	time             time.Time
}

func run(args []string, getenv func(string) string) error {
	var r release
	var output string
	flags := flag.NewFlagSet("sbom", flag.ContinueOnError)
	flags.StringVar(&r.artifact, "artifact", "", "the `file` that is released")
	flags.StringVar(&r.binary, "binary", "", "the Go binary in it, a `file`")
	flags.StringVar(&r.name, "name", "", "the product's `name`")
	flags.StringVar(&r.version, "version", "", "the product's `version`")
	flags.StringVar(&output, "output", "", "the `file` that is written")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var missing error
	flags.VisitAll(func(f *flag.Flag) {
		if f.Value.String() == "" {
			missing = errors.Join(missing, fmt.Errorf("-%s is missing: %s", f.Name, f.Usage))
		}
	})
	if missing != nil {
		return missing
	}

	epoch := getenv("SOURCE_DATE_EPOCH")
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH=%q: the release's time, in seconds since 1970, is not given", epoch)
	}
	r.time = time.Unix(seconds, 0).UTC()

	bill, err := r.bill()
	if err != nil {
		return err
	}
	var document bytes.Buffer
	// 1.6, though the library knows a later one: what reads bills of materials today knows 1.6, and
	// nothing newer is used.
	encoder := cdx.NewBOMEncoder(&document, cdx.BOMFileFormatJSON).SetPretty(true).SetEscapeHTML(false)
	if err := encoder.EncodeVersion(bill, cdx.SpecVersion1_6); err != nil {
		return err
	}
	return os.WriteFile(output, document.Bytes(), 0o644) //nolint:gosec // G306: it is published
}

// bill is the artifact, which has the binary, which has its libraries. Buildinfo says what is
// linked in, and not which module needs which. So the graph leaves out the libraries' own
// dependencies, which means that they are not known.
func (r release) bill() (*cdx.BOM, error) {
	artifactSum, err := sumOf(r.artifact)
	if err != nil {
		return nil, err
	}
	binarySum, err := sumOf(r.binary)
	if err != nil {
		return nil, err
	}
	info, err := buildinfo.ReadFile(r.binary)
	if err != nil {
		return nil, err
	}
	libraries, err := librariesOf(info)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", r.binary, err)
	}

	artifact := cdx.Component{
		BOMRef:  filepath.Base(r.artifact),
		Type:    cdx.ComponentTypeFile,
		Name:    filepath.Base(r.artifact),
		Version: r.version,
		Hashes:  hashes(artifactSum),
	}
	program := purlOfProgram(info, "v"+r.version)
	binary := cdx.Component{
		BOMRef:     program,
		Type:       cdx.ComponentTypeApplication,
		Name:       r.name,
		Version:    r.version,
		Hashes:     hashes(binarySum),
		PackageURL: program,
		Properties: buildProperties(info),
		Components: &libraries,
	}
	var needed []string
	for _, library := range libraries {
		needed = append(needed, library.BOMRef)
	}

	bill := cdx.NewBOM()
	bill.SerialNumber = serial(artifactSum)
	bill.Metadata = &cdx.Metadata{Timestamp: r.time.Format(time.RFC3339), Component: &artifact}
	bill.Components = &[]cdx.Component{binary}
	bill.Dependencies = &[]cdx.Dependency{
		{Ref: artifact.BOMRef, Dependencies: &[]string{binary.BOMRef}},
		{Ref: binary.BOMRef, Dependencies: &needed},
	}
	return bill, nil
}

func sumOf(name string) (sum [sha256.Size]byte, err error) {
	file, err := os.Open(name)
	if err != nil {
		return sum, err
	}
	defer file.Close() //nolint:errcheck // it was only read
	hash := sha256.New()
	if _, err := io.Copy(hash, file); err != nil {
		return sum, err
	}
	return [sha256.Size]byte(hash.Sum(nil)), nil
}

func hashes(sum [sha256.Size]byte) *[]cdx.Hash {
	return &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: fmt.Sprintf("%x", sum)}}
}

// serial is a UUID of version 8, whose bits are free. They come from the artifact's digest, since a
// random UUID would differ each time.
func serial(sum [sha256.Size]byte) string {
	id := sum[:16]
	id[6] = id[6]&0x0f | 0x80 // the version
	id[8] = id[8]&0x3f | 0x80 // the variant, of RFC 9562
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}
