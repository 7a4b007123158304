// Package flowname makes names of flows of what strangers send.
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

// Fit returns name, if a flow can have a name of its length. One that is too long becomes its beginning, by which
// weights know it, and a hash of all of it.
func Fit(name string) string {
	if len(name) <= policy.MaxFlowLen {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	hash := "%h" + hex.EncodeToString(sum[:]) // no percent-encoding begins so
	return name[:policy.MaxFlowLen-len(hash)] + hash
}
