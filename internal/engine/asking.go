package engine

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
)

// othersAfter is how long a server of a Cluster may take to answer a question before other servers are asked as well.
// Servers seldom take longer unless they are far away.
const othersAfter = 50 * time.Millisecond

// answeredWithin is the longest time for a question. go-redis asks some questions without a deadline, and cancelling a
// call doesn't end its read. So this bounds the connections and the goroutines that wait for a server that hangs.
const answeredWithin = 5 * time.Second

// AskOthers is for the client of one server of a Cluster. go-redis asks one server after the other which slots they
// have, and which commands. A server that accepts connections but doesn't answer would use up the time of the call. If
// the server of the client doesn't answer such a question soon, the client asks the servers at addrs as well, and the
// first answer counts. o are the options of the client. open returns a new client with these options and another
// address.
func AskOthers(client *redis.Client, o redis.Options, addrs []string, open func(redis.Options) *redis.Client) {
	client.AddHook(&askingHook{options: o, addrs: addrs, open: open})
}

// askingHook is the redis.Hook of AskOthers.
type askingHook struct {
	options redis.Options
	addrs   []string
	open    func(redis.Options) *redis.Client
}

// asking is the key of a value in the contexts of an askingHook. It keeps the clients of open from asking others.
type asking struct{}

// DialHook implements redis.Hook.
func (*askingHook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessPipelineHook implements redis.Hook.
func (*askingHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// ProcessHook implements redis.Hook.
func (h *askingHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		switch question := cmd.(type) {
		case *redis.ClusterSlotsCmd:
			return firstAnswer(ctx, h, question, redis.NewClusterSlotsCmd, next)
		case *redis.CommandsInfoCmd:
			return firstAnswer(ctx, h, question, redis.NewCommandsInfoCmd, next)
		}
		return next(ctx, cmd)
	}
}

// answer is a command that may have the answer to a question.
type answer[T any] interface {
	redis.Cmder
	Val() T
	SetVal(T)
}

// firstAnswer asks the hook's server with next and, if there is no answer after othersAfter, also the other servers. It
// stores the first answer in cmd. again makes a command like cmd.
func firstAnswer[T any, A answer[T]](ctx context.Context, h *askingHook, cmd A, again func(context.Context, ...any) A,
	next redis.ProcessHook) error {
	if ctx.Value(asking{}) != nil {
		return next(ctx, cmd)
	}
	ctx, cancel := context.WithTimeout(context.WithValue(ctx, asking{}, true), answeredWithin)
	defer cancel()
	answers := make(chan A, 1+len(h.addrs))
	send := func(process redis.ProcessHook) {
		a := again(ctx, cmd.Args()...)
		if err := process(ctx, a); err != nil {
			a.SetErr(err)
		}
		answers <- a
	}
	go send(next)
	others := time.NewTimer(othersAfter)
	defer others.Stop()
	for missing := 1; ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-others.C:
			missing += len(h.addrs)
			for _, addr := range h.addrs {
				go send(h.other(addr))
			}
		case a := <-answers:
			missing--
			if a.Err() == nil {
				cmd.SetVal(a.Val())
				return nil
			}
			if missing == 0 {
				return a.Err()
			}
		}
	}
}

// other returns a function that asks the server at an address.
func (h *askingHook) other(addr string) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		o := h.options
		o.Addr = addr
		client := h.open(o)
		defer client.Close()
		return client.Process(ctx, cmd)
	}
}
