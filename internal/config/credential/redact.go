package credential

import (
	"regexp"
	"strings"
)

var harmlessQuery = regexp.MustCompile(`^db=[0-9]*$`)

// Redact masks the parts of an address that may be secret. The address may be malformed in any way. Redact masks the
// query and everything before the last @ except the user name.
func Redact(s string) string {
	head, rest, found := strings.Cut(s, "://")
	if found {
		head += "://"
	} else {
		head, rest = "", s
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, _, found := strings.Cut(rest[:at], ":")
		if found {
			user += ":"
		} else {
			user = "" // may be a password in the place of the user
		}
		head, rest = head+user+Mask+"@", rest[at+1:]
	}
	if path, query, found := strings.Cut(rest, "?"); found && !harmlessQuery.MatchString(query) {
		rest = path + "?" + Mask
	}
	return head + rest
}
