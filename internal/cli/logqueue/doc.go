// Package logqueue makes loggers that never wait for the reader of the log. A logger puts its messages into a queue. A
// goroutine takes them from the queue and writes them, in their order. The package is for programs whose work must go
// on even if their log is a pipe that is full or closed.
//
// The queue is bounded. While it is full, and while writes fail, messages are dropped. A later message says how many.
//
// The package changes neither the format of messages, which package hclog writes, nor how a program handles SIGPIPE.
package logqueue
