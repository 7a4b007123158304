package cli

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// value is the value of a flag. Its text is passed to read.
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

// NewValue returns the value of a flag. Each text that is given for the flag is passed to read. read stores it, or
// returns an error that describes what is wrong. The help shows kind as the kind of text, and initial as the default.
func NewValue(kind, initial string, read func(string) error) pflag.Value {
	return value{kind, initial, read}
}

// Whole returns the value of a flag for a whole number from lowest to highest, which it stores in n. The help shows the
// present value of n as the default, unless it is below lowest.
func Whole(kind string, n *int64, lowest, highest int64) pflag.Value {
	initial := ""
	if *n >= lowest {
		initial = strconv.FormatInt(*n, 10)
	}
	return NewValue(kind, initial, func(s string) (err error) {
		*n, err = ParseWhole(s, lowest, highest)
		return err
	})
}

// ParseWhole parses a whole number from lowest to highest.
func ParseWhole(s string, lowest, highest int64) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < lowest || n > highest {
		return 0, fmt.Errorf("want a whole number from %d to %d", lowest, highest)
	}
	return n, nil
}

// OutputFlag adds the flag --output to a command, which stores it in form. Values other than text and json are wrong
// usage.
func OutputFlag(cmd *cobra.Command, form *string) {
	cmd.Flags().StringVarP(form, "output", "o", "text", "output format: text or json")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if *form != "text" && *form != "json" {
			return Usage(fmt.Errorf("--output %q: want text or json", *form))
		}
		return nil
	}
}

// wants describes the values of the types of flags that pflag parses.
var wants = map[string]string{
	"bool": "true or false", "int": "a whole number", "duration": "a duration, such as 500ms, 10s or 5m",
}

// Wanted returns the error for a value of a flag that can't be parsed. For the types in wants, it describes the values
// that the flag accepts. For other types it is err, the error of the flag's parser.
func Wanted(f *pflag.Flag, err error) error {
	if want := wants[f.Value.Type()]; want != "" {
		return errors.New("want " + want)
	}
	return err
}
