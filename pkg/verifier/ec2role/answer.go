// SPDX-License-Identifier: Apache-2.0

package ec2role

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strings"
)

// MaxAnswer bounds an answer of STS, in bytes. Those that are known have less than 2 KiB.
const MaxAnswer = 16 << 10

// maxDepth and maxElements bound an answer's elements. Those that are known have 3 levels and 8
// elements.
const maxDepth, maxElements = 8, 64

// namespace is that of STS's answers.
const namespace = "https://sts.amazonaws.com/doc/2011-06-15/"

// caller is who signed a request, by the answer to GetCallerIdentity.
type caller struct{ arn, userID, account string }

// parseCaller parses GetCallerIdentityResponse ("GetCallerIdentity" in the STS API Reference).
func parseCaller(body []byte) (caller, error) {
	texts, err := parseTexts(body, "GetCallerIdentityResponse")
	if err != nil {
		return caller{}, err
	}
	const result = "GetCallerIdentityResponse/GetCallerIdentityResult/"
	c := caller{texts[result+"Arn"], texts[result+"UserId"], texts[result+"Account"]}
	if c.arn == "" || c.userID == "" || c.account == "" {
		return caller{}, errors.New("the answer does not name a caller")
	}
	return c, nil
}

// parseErrorCode returns the code in an ErrorResponse.
func parseErrorCode(body []byte) (string, error) {
	texts, err := parseTexts(body, "ErrorResponse")
	if err != nil {
		return "", err
	}
	code := texts["ErrorResponse/Error/Code"]
	if code == "" {
		return "", errors.New("the answer has no error code")
	}
	return code, nil
}

// parseTexts returns the text of each element that has no elements, by its path. It accepts less
// than XML: one root element in STS's namespace, no attribute but xmlns, no element twice, and no
// text beside elements. encoding/xml would keep the last of two elements, or join their texts.
func parseTexts(body []byte, root string) (map[string]string, error) {
	if len(body) > MaxAnswer {
		return nil, fmt.Errorf("the answer has more than %d bytes", MaxAnswer)
	}
	decoder := xml.NewDecoder(bytes.NewReader(body))
	var path []string
	seen, parents, texts := map[string]bool{}, map[string]bool{}, map[string]string{}
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, errors.New("the answer is not XML")
		}
		at := strings.Join(path, "/")
		switch t := token.(type) {
		case xml.StartElement:
			for _, a := range t.Attr {
				if len(path) > 0 || a.Name.Space != "" || a.Name.Local != "xmlns" {
					return nil, errors.New("the answer has an attribute")
				}
			}
			if t.Name.Space != namespace || (len(path) == 0 && t.Name.Local != root) {
				return nil, fmt.Errorf("the answer is not one %s of STS", root)
			}
			if len(path) == maxDepth || len(seen) == maxElements {
				return nil, errors.New("the answer has too many elements")
			}
			parents[at] = true
			path = append(path, t.Name.Local)
			if at = strings.Join(path, "/"); seen[at] {
				return nil, errors.New("the answer has an element twice")
			}
			seen[at] = true
		case xml.EndElement:
			if parents[at] && strings.TrimSpace(texts[at]) != "" {
				return nil, errors.New("the answer has text beside elements")
			}
			path = path[:len(path)-1]
		case xml.CharData:
			texts[at] += string(t)
		case xml.ProcInst: // <?xml ...?>: the decoder accepts no encoding but UTF-8
			if t.Target != "xml" || len(seen) > 0 {
				return nil, errors.New("the answer has a processing instruction")
			}
		default:
			return nil, errors.New("the answer has a comment or a directive")
		}
	}
	if len(seen) == 0 || strings.TrimSpace(texts[""]) != "" {
		return nil, fmt.Errorf("the answer is not one %s of STS", root)
	}
	return texts, nil
}
