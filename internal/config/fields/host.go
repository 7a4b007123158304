package fields

import (
	"net/netip"
	"regexp"
	"strings"
)

var hostname = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})$`)

// IsHost reports whether s can be a host: an IP address (without brackets) or a name.
func IsHost(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
	return hostname.MatchString(s) && !strings.Contains(s, "..")
}
