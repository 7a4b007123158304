package oracle

import "github.com/tokenrefill/refiller/policy"

// tokensOf returns the number of tokens of a bucket; a bucket that lost its key has none.
func tokensOf(b *policy.Bucket) int64 {
	if b.Tokens == nil {
		return 0
	}
	return *b.Tokens
}

// add changes the number of tokens. Without a change a missing key stays missing.
func add(b *policy.Bucket, n int64) {
	if n != 0 {
		tokens := tokensOf(b) + n
		b.Tokens = &tokens
	}
}

// leastOf returns the number of tokens that a take must leave.
func leastOf(b *policy.Bucket, l policy.Leave) int64 {
	if b.Control == nil {
		return l.Of(0)
	}
	return l.Of(b.Control.Terms.Capacity)
}
