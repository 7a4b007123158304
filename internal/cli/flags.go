package cli

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tokenrefill/refiller/internal/config/fields"
)

// value is a flag whose text is checked as it is read.
type value struct {
	kind, initial string
	read          func(string) error
}

// Set implements pflag.Value.
func (v value) Set(s string) error { return v.read(s) }

// String implements pflag.Value.
func (v value) String() string { return v.initial }

// Type implements pflag.Value.
func (v value) Type() string { return v.kind }

// NewValue returns a flag whose texts are read by read. Kind is what the help calls them; initial is the default that
// it shows.
func NewValue(kind, initial string, read func(string) error) pflag.Value {
	return value{kind, initial, read}
}

// Whole is a flag for a whole number from least to most. The value of n is the default; below least it means a default
// that is no number.
func Whole(kind string, n *int64, least, most int64) pflag.Value {
	initial := ""
	if *n >= least {
		initial = strconv.FormatInt(*n, 10)
	}
	return NewValue(kind, initial, func(s string) (err error) {
		*n, err = ParseWhole(s, least, most)
		return err
	})
}

// ParseWhole reads a whole number from least to most.
func ParseWhole(s string, least, most int64) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("want a whole number from %d to %d", least, most)
	}
	return n, nil
}

// VariableFlags adds a flag for each variable that has one and whose flag begins with one of the families, or for all
// if there are none. What is given is appended to overrides.
func VariableFlags(cmd *cobra.Command, variables []fields.Variable, overrides *[]fields.Override, families ...string) {
	for _, v := range variables {
		name := v.Flag()
		if name == "" || !inFamily(name, families) {
			continue
		}
		cmd.Flags().Var(NewValue("string", "", func(text string) error {
			*overrides = append(*overrides, fields.Override{Source: "--" + name, Field: v.Field, Value: text})
			return nil
		}), name, v.Usage())
	}
	Group(cmd, "Redis", "redis-")
	Group(cmd, "etcd", "etcd-")
	Group(cmd, "the registry of pools", "pool-registry-")
}

func inFamily(name string, families []string) bool {
	for _, family := range families {
		if name == family || strings.HasPrefix(name, family+"-") {
			return true
		}
	}
	return len(families) == 0
}

// OutputFlag gives a command the flag --output, the form of its answer, and has it refuse any other than text and JSON.
func OutputFlag(cmd *cobra.Command, form *string) {
	cmd.Flags().StringVarP(form, "output", "o", "text", "text or json")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if *form != "text" && *form != "json" {
			return Usage(fmt.Errorf("--output %q: want text or json", *form))
		}
		return nil
	}
}

// wants are what values of Go's own types are to be.
var wants = map[string]string{
	"bool": "true or false", "int": "a whole number", "duration": "a duration, such as 500ms, 10s or 5m",
}

// Wanted is what is wrong with a value of a flag: what it is to be, rather than an error of Go's own.
func Wanted(f *pflag.Flag, err error) error {
	if want := wants[f.Value.Type()]; want != "" {
		return errors.New("want " + want)
	}
	return err
}
