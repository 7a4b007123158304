// Package bucketname makes names of buckets from text that clients choose. It doesn't check configured names: see
// package config.
package bucketname

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/tokenrefill/refiller/lua"
)

// Fit returns name if a bucket can have it. If name is too long or has a closing brace, Fit returns its beginning and a
// hash of the whole name. Templates match the beginning. An empty name stays empty.
func Fit(name string) string {
	begin := strings.ReplaceAll(name, "}", "")
	if len(begin) == len(name) && len(name) <= lua.MaxKeyLen {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	hash := "%h" + hex.EncodeToString(sum[:]) // no percent-encoding begins like this
	return begin[:min(len(begin), lua.MaxKeyLen-len(hash))] + hash
}
