package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/operate/drift"
)

// errRefused ends a check of a configuration that replicas would refuse.
var errRefused = errors.New("replicas would refuse this configuration")

// checker validates a configuration.
type checker struct {
	connection
	shared, output string
	againstRedis   bool
	helmValues     bool
}

// sharedUsage is the description of the flag --shared.
const sharedUsage = "file with a document that replicas would read from etcd, as with run --config-etcd"

func checkCommand(e env) *cobra.Command {
	c := checker{connection: connection{env: e}}
	cmd := &cobra.Command{
		Use:   "check FILE|-",
		Short: "Validate a configuration file",
		Long: `Validate a configuration file as the command run would read it: with the REFILLER_ environment variables,
which override the file. The command connects to no server. If FILE is -, it reads stdin.

The exit code is 0 if the file is valid, 2 if it is not, and 1 if it can't be read. Each problem is printed to stderr
with its line.

With --against-redis, the command also compares the configuration with the policies in force in the Redis and the etcd
that it names. The exit code is 3 if replicas would refuse the configuration: its version is below the one in force,
or a policy differs under the same version. The exit code is 1 if Redis or etcd does not reply.

With --shared DOC, the fields of the document DOC replace those of the file if the version of DOC is higher. The
command "run --config-etcd" does the same with the document in etcd.

With --helm-values, FILE has values of the Helm chart. The command validates the value config, with the chart's
defaults. It uses the variables in the value extraEnv, and not those of its own environment.

With -o json, the output is one object with the fields file, ok, summary and problems. Each problem has the fields
source, line, column, field and message. With --against-redis, the object also has the field refused, which has the
format of changes in "diff -o json".`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return c.run(cmd.Context(), args[0]) },
	}
	c.addServerFlags(cmd, "redis", "etcd", "pool-registry")
	cmd.Flags().BoolVar(&c.againstRedis, "against-redis", false,
		"fail if replicas would refuse the configuration because of the versions in force")
	cmd.Flags().BoolVar(&c.helmValues, "helm-values", false, "treat FILE as values of the Helm chart")
	cmd.Flags().StringVar(&c.shared, "shared", "", sharedUsage)
	cli.OutputFlag(cmd, &c.output)
	return cmd
}

// checked is the output of check in JSON.
type checked struct {
	File     string          `json:"file"`
	OK       bool            `json:"ok"`
	Summary  string          `json:"summary,omitempty"`
	Problems config.Problems `json:"problems"`
	Refused  []drift.Change  `json:"refused,omitempty"`
}

func (c *checker) run(ctx context.Context, path string) error {
	cfg, err := c.load(path)
	var problems config.Problems
	if err != nil && !errors.As(err, &problems) {
		return err
	}
	name := path
	if path == "-" {
		name = "stdin"
	}
	answer := checked{File: name, OK: err == nil, Problems: problems}
	if err == nil {
		answer.Summary = cfg.Summary()
		answer.Problems = config.Problems{}
		if c.againstRedis {
			var report drift.Report
			report, err = c.compared(ctx, cfg)
			if err != nil {
				return err
			}
			err = c.judge(&answer, report)
		}
	}
	if c.output == "json" {
		return errors.Join(cli.WriteJSON(c.Stdout, answer, "  "), err)
	}
	if answer.OK {
		return c.write(answer, cfg)
	}
	return err
}

// compared compares the configuration with the policies in force.
func (c *checker) compared(ctx context.Context, cfg config.Config) (drift.Report, error) {
	ctx, cancel := context.WithTimeout(ctx, diffTimeout)
	defer cancel()
	return compare(ctx, cfg)
}

// judge records the changes that replicas would refuse in the output. If there are any, it returns an error that lists
// them.
func (c *checker) judge(answer *checked, report drift.Report) error {
	answer.Refused = report.Refused()
	if len(answer.Refused) == 0 {
		return nil
	}
	answer.OK = false
	answer.Summary = ""
	return fmt.Errorf("%s: %w:\n%s%s", answer.File, errRefused, describeChanges(answer.Refused), raising(answer.Refused))
}

// raising returns the commands that raise versions so that replicas accept the configuration. Each command is on one
// line.
func raising(refused []drift.Change) string {
	text := ""
	for _, c := range refused {
		flag := ""
		if c.What == "pools_version" || c.What == "pool" {
			flag = " --pools"
		}
		if step := "To raise the version, run: refiller bump --above-redis" + flag + " FILE"; !strings.Contains(text, step) {
			text += step + "\n"
		}
	}
	return strings.TrimSuffix(text, "\n")
}

// write writes the output for a valid configuration as text.
func (c *checker) write(answer checked, cfg config.Config) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: ok: %s\n", answer.File, answer.Summary)
	for _, t := range cfg.Templates.All() {
		if t.Terms.Budget() {
			fmt.Fprintf(&b, "  template %q: capacity %d, %d tokens %s\n", t.Prefix, t.Policy.Capacity, t.Policy.StepTokens,
				t.Policy.Steps)
			continue
		}
		fmt.Fprintf(&b, "  template %q: capacity %d, rate %s, %s\n", t.Prefix, t.Policy.Capacity, t.Policy.Rate, t.Enforce)
	}
	_, err := io.WriteString(c.Stdout, b.String())
	return err
}

// load reads the configuration from its file. With --helm-values it reads it from values of the Helm chart.
func (c *checker) load(path string) (config.Config, error) {
	if !c.helmValues {
		return loadFile(c.env, path, c.shared, c.fromFlags)
	}
	name, data, err := readArgument(c.env, path)
	if err != nil {
		return config.Config{}, err
	}
	source, fromRelease, err := config.FromHelmValues(name, data)
	if err != nil {
		return config.Config{}, err
	}
	if fromRelease && c.againstRedis {
		return config.Config{}, fmt.Errorf(
			"--against-redis can't be used with %s: its versionFrom is release, so only the Helm release knows the version. "+
				"The chart checks against Redis before each upgrade (checkUpgrade)", name)
	}
	source.Flags = c.fromFlags
	source.Shared, err = sharedFile(c.shared)
	if err != nil {
		return config.Config{}, err
	}
	return config.Load(source)
}

// loadFile reads the configuration from the file that path names; "-" means stdin. If shared is not empty, the document
// in that file replaces parts of it. The environment and the flags replace parts of both.
func loadFile(e env, path, shared string, flags []config.Override) (config.Config, error) {
	name, data, err := readArgument(e, path)
	if err != nil {
		return config.Config{}, err
	}
	doc, err := sharedFile(shared)
	if err != nil {
		return config.Config{}, err
	}
	return config.Load(config.Source{Path: name, Data: data, Shared: doc, Env: e.Environ, Flags: flags})
}

// readArgument reads the file that an argument names; "-" means stdin. It returns the name of the file for messages,
// and its data. If a file is too large, readArgument reads only enough of it to find that out.
func readArgument(e env, path string) (name string, data []byte, err error) {
	if path == "-" {
		data, err = io.ReadAll(io.LimitReader(e.Stdin, fields.MaxSize+1))
		if err != nil {
			return "", nil, fmt.Errorf("stdin: %w", err)
		}
		return "stdin", data, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return "", nil, fmt.Errorf("config: %w", err)
	}
	defer f.Close()
	data, err = io.ReadAll(io.LimitReader(f, fields.MaxSize+1))
	if err != nil {
		return "", nil, fmt.Errorf("config: %w", err)
	}
	return path, data, nil
}

// sharedFile reads the file of a document that replicas share. If path is empty, it returns no document.
func sharedFile(path string) (config.Shared, error) {
	if path == "" {
		return config.Shared{}, nil
	}
	data, err := os.ReadFile(path)
	return config.Shared{Source: path, Data: data}, err
}
