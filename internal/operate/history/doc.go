// Package history records refill calls as JSON objects, one in a line, in files to which it only appends. It is not a
// log for people. A replica writes its refill calls ([Refill]). A verifier reads them afterwards to check the bucket's
// promises.
//
// Records reach the kernel within moments. So they survive a SIGKILL of the writer, but not a crash of the machine.
package history
