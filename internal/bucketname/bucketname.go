// Package bucketname makes names of buckets of what strangers send.
package bucketname

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/tokenrefill/refiller/lua"
)

// Fit is name if a bucket can have it. One that is too long, or has a closing brace, becomes its beginning, by which
// templates know it, and a hash of all of it. An empty one stays empty.
func Fit(name string) string {
	begin := strings.ReplaceAll(name, "}", "")
	if len(begin) == len(name) && len(name) <= lua.MaxKeyLen {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	hash := "%h" + hex.EncodeToString(sum[:]) // no percent-encoding begins so
	return begin[:min(len(begin), lua.MaxKeyLen-len(hash))] + hash
}
