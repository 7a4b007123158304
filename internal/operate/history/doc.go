// Package history keeps what happened to buckets: JSON objects, one a line, in files that are only appended to. A
// replica writes its refill calls ([Refill]); whoever wants to know whether the bucket's promises were kept reads them
// afterwards.
//
// What was added reaches the kernel within moments, so it survives the SIGKILL of the writer, though not a crash of the
// machine.
package history
