package policy

import (
	"fmt"
	"strconv"
	"strings"
)

// Leave is the number of tokens that a take must leave in the bucket, or a percentage of the capacity. A take that
// would leave less is denied. The zero Leave demands nothing.
type Leave struct {
	Tokens  int64 // 0 to MaxTokens
	Percent int64 // 0 to 100, if Tokens is 0
}

// ParseLeave reads a Leave in the form that String writes. It returns an error if the Leave is out of range.
func ParseLeave(s string) (Leave, error) {
	digits, percent := strings.CutSuffix(s, "%")
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		return Leave{}, fmt.Errorf(
			"policy: leave: %q is neither a whole number, such as 100, nor one of percent, such as 20%%", s)
	}
	l := Leave{Tokens: n}
	if percent {
		l = Leave{Percent: n}
	}
	return l, l.Validate()
}

// Validate returns an error if the Leave is out of range.
func (l Leave) Validate() error {
	switch {
	case l.Tokens < 0 || l.Tokens > MaxTokens:
		return fmt.Errorf("policy: leave: %d tokens; want 0 to %d", l.Tokens, int64(MaxTokens))
	case l.Percent < 0 || l.Percent > 100:
		return fmt.Errorf("policy: leave: %d percent; want 0 to 100", l.Percent)
	case l.Tokens > 0 && l.Percent > 0:
		return fmt.Errorf("policy: leave: %d tokens and %d percent; want one of them", l.Tokens, l.Percent)
	}
	return nil
}

// Of returns the number of tokens to leave in a bucket of this capacity: a percentage is rounded up.
func (l Leave) Of(capacity int64) int64 {
	return l.Tokens + capacity/100*l.Percent + (capacity%100*l.Percent+99)/100
}

// String writes the Leave as the scripts read it: "5" or "20%".
func (l Leave) String() string {
	if l.Percent > 0 {
		return strconv.FormatInt(l.Percent, 10) + "%"
	}
	return strconv.FormatInt(l.Tokens, 10)
}
