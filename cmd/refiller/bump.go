package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
)

// bumper raises the version in a file.
type bumper struct {
	connection
	pools, above bool
	output       string
}

func bumpCommand(e env) *cobra.Command {
	b := bumper{connection: connection{env: e}}
	cmd := &cobra.Command{
		Use:   "bump FILE",
		Short: "Raise the version in a configuration file",
		Long: `Raise the version in a configuration file, or in a document for etcd, by one. Nothing else in the file
changes.

With --pools, the command raises pools_version instead of version.

With --above-redis, the command also reads the highest version in force from the Redis that the file names, or from
its etcd with --pools. The new version is then above both that version and the file's. Use this after you have gone
back to an earlier file, for example with git revert: replicas refuse a file whose version is below the one in force.`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return b.run(cmd.Context(), args[0]) },
	}
	b.addServerFlags(cmd, "redis", "etcd", "pool-registry")
	cmd.Flags().BoolVar(&b.pools, "pools", false, "raise pools_version instead of version")
	cmd.Flags().BoolVar(&b.above, "above-redis", false,
		"raise the version above the one in force in Redis, or with --pools in etcd")
	cli.OutputFlag(cmd, &b.output)
	return cmd
}

// run raises the version in the file at path. It writes the old and the new version to stdout.
func (b *bumper) run(ctx context.Context, path string) error {
	field := config.VersionField
	if b.pools {
		field = config.PoolsVersionField
	}
	least := int64(-1)
	if b.above {
		var err error
		least, err = b.inForce(ctx, path)
		if err != nil {
			return err
		}
	}
	target, err := filepath.EvalSymlinks(path) // otherwise the link would be replaced by a file
	if err != nil {
		return err
	}
	text, err := os.ReadFile(target)
	if err != nil {
		return err
	}
	changed, from, to, err := config.Bump(text, field, least)
	if err != nil {
		return cli.Usage(fmt.Errorf("bump %s: %w", path, err))
	}
	if err := replaceFile(target, changed); err != nil {
		return err
	}
	if b.output == "json" {
		return cli.WriteJSON(b.Stdout, map[string]any{"file": path, "field": field, "from": from, "to": to}, "")
	}
	return line(b.Stdout, fmt.Sprintf("%s: %s %d → %d", path, field, from, to))
}

// inForce returns the highest version in force: with --pools that of the pools, otherwise that of the buckets and
// templates.
func (b *bumper) inForce(ctx context.Context, path string) (int64, error) {
	cfg, err := loadFile(b.env, path, "", b.fromFlags)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, diffTimeout)
	defer cancel()
	report, err := compare(ctx, cfg)
	if err != nil {
		return 0, err
	}
	if b.pools {
		return report.PoolsVersion, nil
	}
	return report.Version, nil
}

// replaceFile replaces a file atomically. Otherwise a replica that watches the file might read half of it.
func replaceFile(path string, text []byte) (err error) {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(text)
	err = errors.Join(err, f.Chmod(info.Mode().Perm()), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
