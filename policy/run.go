package policy

// Run is a sequence of Count takes of N tokens each. Both numbers are at least 1. Each take must leave as many tokens
// as Leave demands.
type Run struct {
	N, Count int64
	Leave    Leave
	// UpTo makes the run one take of as many tokens as there are, up to Count. N is then 1. The take is denied if there
	// is no token.
	UpTo bool
}

// RunTaking is the result of a run.
type RunTaking struct {
	Taken int64 // how many of its takes were made: the first ones
	Wait  int64 // as in Taking, for the bucket as the last run of the call left it; 0 if all takes were made
}
