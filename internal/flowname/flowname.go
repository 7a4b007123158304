// Package flowname makes names of flows from text that clients choose. The rules for names are in package policy.
package flowname

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/tokenrefill/refiller/policy"
)

// empty is the level for an empty text. No other text has it, since percent signs are encoded.
const empty = "%"

// Level returns the text as one level of a name: slashes are percent-encoded, so that a caller that chooses the text
// can't choose a team. Different texts have different levels.
func Level(text string) string {
	return Encoded(strings.ReplaceAll(text, "%", "%25"))
}

// Encoded is like Level, for a text whose percent signs are encoded already.
func Encoded(text string) string {
	if text == "" {
		return empty
	}
	return strings.ReplaceAll(text, "/", "%2F")
}

// Fit returns name, if a flow can have a name of its length. If name is too long, Fit returns its beginning, which
// weights match, and a hash of the whole name.
func Fit(name string) string {
	if len(name) <= policy.MaxFlowLen {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	hash := "%h" + hex.EncodeToString(sum[:]) // no percent-encoding begins like this
	return name[:policy.MaxFlowLen-len(hash)] + hash
}
