// Package fetchotel makes a span of every call of a [fetch.Client], for OpenTelemetry.
//
//	client, err := fetch.New(rdb, fetch.WithHook(fetchotel.New(otel.GetTracerProvider(), nil)))
//
// A span is a child of the one in the caller's context, and what the call does with
// its context, such as the commands of an instrumented Redis client, is below it. Its
// name is that of the call, such as "refiller take", and its attributes are
//
//	refiller.op         take, take_up_to, take_all, wait, peek, return, reserve, settle
//	refiller.bucket     what a function makes of the key; missing without one
//	refiller.tokens     asked for, or used
//	refiller.outcome    taken, denied, done, or what went wrong: see fetch.Outcome.Name
//	refiller.taken      tokens, if any
//	refiller.source     who answered: shared, leased, cached, rescued, fallback
//	refiller.shadow     true if a bucket in shadow mode would have denied the call
//	refiller.reason     why the bucket's server did not answer; missing if it did
//
// Only a call that ends with an error is one in the span's status, whose description is the outcome: the text of the
// error has the key. A denial is an answer. A call that joins others in one script call has its own span, and the
// commands are below the span of the call that makes it.
package fetchotel
