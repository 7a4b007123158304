// Package history records what happens to buckets: JSON objects, one a line, in files that are only appended to. A
// replica writes its refill calls ([Refill]). A verifier reads them afterwards to check the bucket's promises.
//
// What was added reaches the kernel within moments, so it survives the SIGKILL of the writer, though not a crash of the
// machine.
package history
