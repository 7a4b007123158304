package lua

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// MaxKeyLen is the longest name of a bucket, in bytes.
const MaxKeyLen = 512

// ErrInvalidKey is returned for a bucket name that is empty, longer than
// MaxKeyLen bytes, or has a closing brace.
var ErrInvalidKey = errors.New("refiller: invalid key")

// CheckKey returns an error if key can't name a bucket. A closing brace would end the hash tag early and put the
// bucket's keys into different Cluster slots.
func CheckKey(key string) error {
	switch {
	case key == "":
		return fmt.Errorf("%w: it is empty; want 1 to %d bytes", ErrInvalidKey, MaxKeyLen)
	case len(key) > MaxKeyLen:
		return fmt.Errorf("%w: it has %d bytes; want 1 to %d", ErrInvalidKey, len(key), MaxKeyLen)
	case strings.IndexByte(key, '}') >= 0:
		return fmt.Errorf("%w %q: a closing brace is not allowed", ErrInvalidKey, key)
	}
	return nil
}

// TokensKey returns the key of the bucket's tokens: its name.
func TokensKey(key string) string { return key }

// IndexKey returns the key of the bucket's index.
func IndexKey(key string) string { return "{" + key + "}" }

// ControlKey returns the key of the bucket's state and policy.
func ControlKey(key string) string { return "{" + key + "}:ctl" }

// OutstandingKey returns the key of the bucket's reservations and leases.
func OutstandingKey(key string) string { return "{" + key + "}:outstanding" }

// DueKey returns the key of the times when the bucket's reservations and leases end.
func DueKey(key string) string { return "{" + key + "}:due" }

// LiveKey returns the key of the bucket's live consumers.
func LiveKey(key string) string { return "{" + key + "}:live" }

// RequestKey returns the key under which the bucket remembers a request.
func RequestKey(key, id string) string { return IndexKey(key) + requestInfix + id }

// AliveKey returns the key of the sorted set of a bounded template's buckets that are alive. A bounded template limits
// the number of its buckets. The set has their names, ordered by the second in which they expire. Its key can't be the
// key of a bucket.
func AliveKey(prefix string) string { return "{refiller:alive:" + prefix + "}:keys" }

// OverrideKey returns the key of the override of a template's bucket.
func OverrideKey(key string) string { return "{" + key + "}:override" }

// FlowsKey returns the key of the plan by which the bucket is divided among its flows.
func FlowsKey(key string) string { return "{" + key + "}:flows" }

// UseKey returns the key of the demand of the bucket's flows.
func UseKey(key string) string { return "{" + key + "}:use" }

// LazyKey returns the key of a bucket of a lazy template.
func LazyKey(key string) string { return "{" + key + "}:lazy" }

// contents describes what each kind of key holds. The kind is the part of the key after the closing brace.
var contents = map[string]string{
	"": "a whole number, the index", ":ctl": "the bucket's state", ":outstanding": "the bucket's reservations and leases",
	":due": "when they end", ":live": "its consumers", ":lazy": "an instant", ":override": "a policy", ":set": "templates",
	":flows": "how it is divided", ":use": "what its flows asked for",
}

// contentOf returns what a key of this package should hold.
func contentOf(key string) string {
	_, kind, tagged := strings.Cut(key, "}")
	switch {
	case !tagged:
		return "a whole number of tokens"
	case strings.HasPrefix(kind, requestInfix):
		return "a request"
	}
	return contents[kind]
}

// bucketOf returns the name of the bucket to which a key of this package belongs.
func bucketOf(key string) string {
	if name, _, tagged := strings.Cut(key, "}"); tagged {
		return name[1:]
	}
	return key
}

// outstandingKeys returns the five keys of a bucket for the scripts of reservations and
// leases.
func outstandingKeys(key string) []string {
	return append(bucketKeys(key), OutstandingKey(key), DueKey(key))
}

// bucketKeys returns the three keys of a bucket. They share one string.
func bucketKeys(key string) []string {
	control := ControlKey(key)
	return []string{control[1 : 1+len(key)], control[:2+len(key)], control}
}

// Slots is the number of a Cluster's hash slots.
const Slots = 16384

// Slot returns the Cluster hash slot of the bucket: CRC-16/XMODEM of its name,
// modulo Slots, as the Cluster specification says.
func Slot(key string) int {
	crc := uint16(0)
	for i := range len(key) {
		crc = crc<<8 ^ crcOf[byte(crc>>8)^key[i]]
	}
	return int(crc % Slots)
}

// crcOf has the CRC-16/XMODEM of each byte.
var crcOf = func() (table [256]uint16) {
	for b := range table {
		crc := uint16(b) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
		table[b] = crc
	}
	return table
}()

// ProbeKey returns a key that never exists. Clients read it to measure the round trip to a server. The keys of many n
// are in many different slots.
func ProbeKey(n int) string { return "refiller:probe:" + strconv.Itoa(n) }
