package policy

// Run is Count takes of N tokens each that follow one another; both are at least
// 1. Each must leave what Leave says.
type Run struct {
	N, Count int64
	Leave    Leave
	// UpTo makes it one take of as many tokens as there are, up to Count; N is 1. It is
	// denied if there is none.
	UpTo bool
}

// RunTaking is what became of a run.
type RunTaking struct {
	Taken int64 // how many of its takes were taken: the first ones
	Wait  int64 // as in Taking, after the last run; 0 if all were taken
}
