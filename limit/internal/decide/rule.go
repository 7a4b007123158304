package decide

import (
	_ "embed"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

//go:embed decide.lua
var source string

// Rule is a limit.
type Rule struct {
	Name   string        // distinguishes limits of one kind on the same key; may be empty
	Kind   string        // the name of the rule in the script
	Suffix string        // the end of the rule's key in Redis
	Source string        // the rule in Lua
	Args   [3]int64      // the rule's numbers
	Text   string        // describes the limit to people
	Limit  int64         // the most tokens that can ever fit
	Window time.Duration // the time to which Limit refers
	// Span returns the window of the calendar that contains an instant, in Unix µs; nil if the rule follows no calendar.
	// The length and the end of the window, in ms, are the rule's second and third number in each call.
	Span func(at int64) (begin, end int64)
	// Era returns a number that names the window of a take, given the time and the outcome of the take. It is nil if the
	// rule has no windows.
	Era   func(now int64, o *Outcome) int64
	table func() table // makes an empty table; see WithModel
}

// rules has, for each type of config, the function that makes the Rule of such a config.
var rules = map[reflect.Type]func(any) (Rule, error){}

// Define makes RuleOf use the function rule for configs of type C. It is called only while packages are initialised. So
// the type of a config needs no exported method that returns a Rule.
func Define[C any](rule func(C) (Rule, error)) {
	rules[reflect.TypeFor[C]()] = func(config any) (Rule, error) { return rule(config.(C)) }
}

// RuleOf returns the Rule of a config.
func RuleOf(config any) (Rule, error) {
	rule := rules[reflect.TypeOf(config)]
	if rule == nil {
		return Rule{}, fmt.Errorf("a %T; want a lazy.Config, a window.Config or a pacing.Config", config)
	}
	return rule(config)
}

// MaxName is the length of the longest name of a limit, in bytes.
const MaxName = 64

const nameLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-/:"

// CheckName reports whether a limit can have the name.
func CheckName(name string) error {
	if len(name) > MaxName {
		return fmt.Errorf("name: it has %d bytes; want 0 to %d", len(name), MaxName)
	}
	if i := strings.IndexFunc(name, func(c rune) bool { return !strings.ContainsRune(nameLetters, c) }); i >= 0 {
		return fmt.Errorf("name: %q may have letters, digits and the signs _.-/: and nothing else", name)
	}
	return nil
}

func (r *Rule) era(now int64, o *Outcome) int64 {
	if r.Era == nil {
		return 0
	}
	return r.Era(now, o)
}

// Key returns the rule's key in Redis for the caller's key. Both keys are in the same Cluster slot.
func (r Rule) Key(key string) string {
	k := "{" + key + "}:" + r.Suffix
	if r.Name != "" {
		k += ":" + r.Name
	}
	return k
}

// numbers returns the rule's numbers for a call that is made at about the time near, in Unix µs.
func (r *Rule) numbers(near int64) [3]int64 {
	args := r.Args
	if r.Span != nil {
		begin, end := r.Span(near)
		args[1], args[2] = (end-begin)/1000, end/1000
	}
	return args
}

// Check reports whether n tokens can be taken, or given back.
func (r Rule) Check(key string, n int64, what What) error {
	if err := lua.CheckKey(key); err != nil {
		return err
	}
	if n < 1 || n > policy.MaxTokens {
		return fmt.Errorf("%w: %d tokens; want 1 to %d", fetch.ErrInvalidAmount, n, int64(policy.MaxTokens))
	}
	if what != Return && n > r.Limit {
		return fmt.Errorf("%w: %d tokens; want 1 to %d", fetch.ErrExceedsCapacity, n, r.Limit)
	}
	return nil
}

// compile makes the script that decides by the rules.
func compile(rules []Rule) *lua.Script {
	var kinds []string
	var parts strings.Builder
	for _, r := range rules {
		if !slices.Contains(kinds, r.Kind) {
			kinds = append(kinds, r.Kind)
			parts.WriteString(r.Source)
		}
	}
	return lua.NewScript(strings.Join(kinds, "+"), strings.Replace(source, "--#rules\n", parts.String(), 1))
}
