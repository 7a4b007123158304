package lua

import (
	"context"
	"crypto/sha1" //nolint:gosec // Redis names scripts by their SHA-1.
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

//go:embed *.lua shared/*.lua
var files embed.FS

// Client sends one command. Every go-redis client is a Client.
type Client interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// script is a Lua source with its hash.
type script struct{ name, source, sha string }

// include is the line of a script that a shared piece replaces.
var include = regexp.MustCompile(`(?m)^--#include (\S+)\n`)

// newScript reads name.lua.
func newScript(name string) *script {
	s := hashed(name, expand(read(name)))
	return &s
}

func read(name string) string {
	b, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic(err) // embedded at build time
	}
	return string(b)
}

// expand replaces each line "--#include shared/name" by that file, which has functions that scripts share. A shared
// piece includes no other piece. So a script includes all pieces that it needs, in an order in which each piece follows
// those that it uses.
func expand(source string) string {
	return include.ReplaceAllStringFunc(
		source, func(line string) string { return read(include.FindStringSubmatch(line)[1]) })
}

func hashed(name, source string) script {
	sum := sha1.Sum([]byte(source)) //nolint:gosec // as above
	return script{name: name, source: source, sha: hex.EncodeToString(sum[:])}
}

var (
	addScript       = newScript("add")
	takeScript      = newScript("take")
	takesScript     = newScript("takes")
	takeOnceScript  = newScript("takeonce")
	takeAllScript   = newScript("takeall")
	heartbeatScript = newScript("heartbeat")
	returnScript    = newScript("return")
	peekScript      = newScript("peek")
	grantScript     = newScript("grant")
	resetScript     = newScript("reset")
	refillScript    = newScript("refill")
	ticketScript    = newScript("ticket")

	reserveScript = newScript("reserve")
	settleScript  = newScript("settle")
	leaseScript   = newScript("lease")
	sweepScript   = newScript("sweep")

	lazyScript     = newScript("lazy")
	enterScript    = newScript("enter")
	moveScript     = newScript("move")
	claimScript    = newScript("claim")
	publishScript  = newScript("publish")
	overrideScript = newScript("override")
	flowsScript    = newScript("flows")
	planScript     = newScript("plan")

	allScripts = []*script{
		addScript, takeScript, takesScript, takeOnceScript, takeAllScript, heartbeatScript, returnScript, peekScript,
		grantScript, resetScript, refillScript, ticketScript, reserveScript, settleScript, leaseScript, sweepScript,
		lazyScript, enterScript, moveScript, claimScript, publishScript, overrideScript, flowsScript, planScript,
	}
)

// once is a command that go-redis must not retry.
type once struct{ *redis.Cmd }

// NoRetry implements redis.Cmder.
func (once) NoRetry() bool { return true }

// by returns the first two words of a call: EVALSHA and the script's hash, or EVAL and its source. They have the type
// any, which spares an allocation.
func (s *script) by(source bool) (verb, body any) {
	if source {
		return "eval", s.source
	}
	return "evalsha", s.sha
}

// command returns the command of the script's call with these words.
func (s *script) command(ctx context.Context, words []any, source bool) once {
	verb, body := s.by(source)
	return command(ctx, withScript(words, verb, body))
}

// doTakes makes a call of takes. command returns the command with the script's hash. If source is set, the command has
// the script's source instead, for a server that doesn't know the script. read reads the reply; its argument is the
// error of the command.
func doTakes(
	ctx context.Context, c Client, command func(source bool) (redis.Cmder, error),
	read func(err error) ([]TakesReply, error),
) ([]TakesReply, error) {
	cmd, err := command(false)
	if err != nil {
		return nil, err
	}
	err = c.Process(ctx, cmd)
	if !IsNoScript(err) {
		return read(err)
	}
	cmd, err = command(true)
	if err != nil {
		return nil, err
	}
	return read(c.Process(ctx, cmd))
}

// onceIntegers is like once, for a script whose reply is a list of integers. They are read without an allocation for
// each.
type onceIntegers struct{ *redis.IntSliceCmd }

// NoRetry implements redis.Cmder.
func (onceIntegers) NoRetry() bool { return true }

func command(ctx context.Context, words []any) once {
	cmd := redis.NewCmd(ctx, words...)
	if words[firstKey-1] != 0 {
		cmd.SetFirstKeyPos(firstKey)
	}
	return once{cmd}
}

// integersCommand is like command, for a script whose reply is a list of integers.
func integersCommand(ctx context.Context, words []any) onceIntegers {
	cmd := redis.NewIntSliceCmd(ctx, words...)
	if words[firstKey-1] != 0 {
		cmd.SetFirstKeyPos(firstKey)
	}
	return onceIntegers{cmd}
}

// firstKey is the place of a script's first key among the words of its call.
const firstKey = 3

// noWords returns the words of a call up to its keys, with room for keys and arguments. withScript fills in the first
// two words.
func noWords(keys, args int) []any {
	words := make([]any, firstKey, firstKey+keys+args)
	words[firstKey-1] = keys
	return words
}

// words returns the words of a script's call.
func words(keys []string, args []any) []any {
	all := noWords(len(keys), len(args))
	for i := range keys {
		all = append(all, &keys[i]) // written as the string; spares an allocation
	}
	return append(all, args...)
}

// withScript sets the first two words of a call. If an earlier attempt has set them, withScript sets them in a copy,
// because the words of that attempt must not change.
func withScript(words []any, verb, body any) []any {
	if words[0] != nil {
		words = slices.Clone(words)
	}
	words[0], words[1] = verb, body
	return words
}

// run calls the script once. If the server answers NOSCRIPT, the script did not run, and run sends its source.
func (s *script) run(ctx context.Context, c Client, keys []string, args ...any) (any, error) {
	cmd, err := send(ctx, c, s, words(keys, args), command)
	if err != nil {
		return nil, err
	}
	return cmd.Val(), nil
}

// send is like run, but it is given the words of the call. command makes a command of the words.
func send[C redis.Cmder](ctx context.Context, c Client, s *script, words []any,
	command func(ctx context.Context, words []any) C) (cmd C, err error) {
	for _, source := range []bool{false, true} {
		verb, body := s.by(source)
		cmd = command(ctx, withScript(words, verb, body))
		err = c.Process(ctx, cmd)
		if !IsNoScript(err) {
			break
		}
	}
	if err != nil {
		err = callError(s.name, err)
	}
	return cmd, err
}

// unauthenticated is the beginning of the error with which a server that wants a password refuses a command of more
// than ten words.
const unauthenticated = "ERR Protocol error: unauthenticated"

// callError returns the error of a script's call. It explains a missing password, whose error reads like a broken
// protocol.
func callError(name string, err error) error {
	if redis.HasErrorPrefix(err, unauthenticated) {
		return fmt.Errorf("refiller: %s: NOAUTH, the server wants a password: %w", name, err)
	}
	return fmt.Errorf("refiller: %s: %w", name, err)
}

// scriptCmd is the command of a script's call.
type scriptCmd interface {
	redis.Cmder
	answered() bool
}

func (c once) answered() bool         { return c.Val() != nil }
func (c onceIntegers) answered() bool { return c.Val() != nil }

// pipeline calls the script n times in one round trip. command makes the command of call i. If calls get NOSCRIPT, they
// did not run. Then pipeline loads the script and sends them again. If they get NOSCRIPT even then, because the scripts
// were flushed in between, it sends them with the source.
func pipeline[C scriptCmd](ctx context.Context, rdb redis.UniversalClient, s *script, n int,
	command func(i int, verb, body string) C) ([]C, []error) {
	cmds, errs := make([]C, n), make([]error, n)
	send := func(which []int, verb, body string) (unknown []int) {
		pipe := rdb.Pipeline()
		for _, i := range which {
			cmds[i] = command(i, verb, body)
			_ = pipe.Process(ctx, cmds[i]) // queues
		}
		_, execErr := pipe.Exec(ctx)
		for _, i := range which {
			err := cmds[i].Err()
			if err == nil && execErr != nil && !cmds[i].answered() {
				err = execErr // the batch failed before this command was answered
			}
			if redis.HasErrorPrefix(err, "NOSCRIPT") {
				unknown = append(unknown, i)
			}
			errs[i] = err
			if err != nil {
				errs[i] = callError(s.name, err)
			}
		}
		return unknown
	}
	if n == 0 {
		return cmds, errs
	}
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	unknown := send(all, "evalsha", s.sha)
	if len(unknown) > 0 && rdb.ScriptLoad(ctx, s.source).Err() == nil {
		unknown = send(unknown, "evalsha", s.sha)
	}
	if len(unknown) > 0 {
		send(unknown, "eval", s.source)
	}
	return cmds, errs
}

// span is the range of the buckets of one script call, among many buckets. It excludes to.
type span struct{ from, to int }

// spansOf divides n buckets into spans of at most perCall neighbours. On a Cluster the buckets of a span are in one
// slot.
func spansOf(rdb redis.UniversalClient, n, perCall int, key func(i int) string) []span {
	spans := make([]span, 0, (n+perCall-1)/perCall)
	_, cluster := rdb.(*redis.ClusterClient)
	for from, to := 0, 0; from < n; from = to {
		to = min(from+perCall, n)
		if cluster {
			slot := Slot(key(from))
			for i := from + 1; i < to; i++ {
				if Slot(key(i)) != slot {
					to = i
				}
			}
		}
		spans = append(spans, span{from, to})
	}
	return spans
}

// Refuses reports whether an error may concern only one of a call's buckets: the server forbids us its keys, or the
// script failed for it.
func Refuses(err error) bool {
	var reply redis.Error // redis.HasErrorPrefix doesn't find the prefix ERR
	if !errors.As(err, &reply) {
		return false
	}
	text := reply.Error()
	return strings.HasPrefix(text, "NOPERM") || strings.HasPrefix(text, "ERR") && strings.Contains(text, "user_script")
}

// EachAlone makes a call for many buckets, perCall of them in each script call. If the server refuses a script call
// because of one bucket, EachAlone repeats it with one call for each of its buckets. So the other buckets aren't held
// up.
func EachAlone[C, R any](asked []C, perCall int, ask func(asked []C, perCall int) []R, failed func(*R) error) []R {
	results := ask(asked, perCall)
	var refused []int
	var again []C
	for i := range results {
		if perCall > 1 && Refuses(failed(&results[i])) {
			refused, again = append(refused, i), append(again, asked[i])
		}
	}
	if len(refused) > 0 {
		for k, r := range ask(again, 1) {
			results[refused[k]] = r
		}
	}
	return results
}

// pipelined calls the script n times in one round trip, with the keys and arguments
// that call makes: see pipeline.
func (s *script) pipelined(ctx context.Context, rdb redis.UniversalClient, n int,
	call func(i int) (keys []string, args []any)) ([]once, []error) {
	return pipeline(ctx, rdb, s, n, func(i int, verb, body string) once {
		keys, args := call(i)
		return command(ctx, withScript(words(keys, args), verb, body))
	})
}

// each sends n commands in one round trip. Each of them then has a reply or an error. The error is that of the command
// or that of the round trip.
func each[C redis.Cmder](ctx context.Context, rdb redis.UniversalClient, n int,
	command func(p redis.Pipeliner, i int) C) (cmds []C, errs []error) {
	cmds, errs = make([]C, n), make([]error, n)
	_, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range cmds {
			cmds[i] = command(p, i)
		}
		return nil
	})
	refused := err != nil && !slices.ContainsFunc(cmds, func(c C) bool { return errors.Is(c.Err(), err) })
	for i, cmd := range cmds {
		errs[i] = cmd.Err()
		if errs[i] == nil && refused {
			errs[i] = err
		}
	}
	return cmds, errs
}

// Load puts every script into the server's cache, on a Cluster into every
// master's, so that the first calls don't carry sources.
func Load(ctx context.Context, rdb redis.Scripter) error {
	for _, s := range allScripts {
		if err := rdb.ScriptLoad(ctx, s.source).Err(); err != nil {
			return fmt.Errorf("refiller: load %s: %w", s.name, err)
		}
	}
	return nil
}
