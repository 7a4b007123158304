package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/lua"
)

// deleted is the result of the deletion of a bucket.
type deleted struct {
	Key    string `json:"key"`
	Keys   int64  `json:"keys"`   // number of keys that were deleted
	Tokens int64  `json:"tokens"` // number of tokens that the bucket held
}

func deleteCommand(e env) *cobra.Command {
	op := operation{connection: connection{env: e}, verb: "delete"}
	cmd := &cobra.Command{
		Use:   "delete KEY",
		Short: "Delete a bucket that is no longer configured",
		Long: `Delete a bucket from Redis, with its tokens, reservations and leases. Use this command after you have removed
the bucket from the configuration. Otherwise consumers keep refilling the bucket if it has a rate. The command refuses
to delete a bucket that is still in the file of --config, because replicas would create it again.

Records of request ids are not deleted, because they expire. An override of the key is not deleted either. To remove
it, run "refiller limit unset KEY".`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return op.delete(cmd.Context(), args[0]) },
	}
	op.flags(cmd)
	return cmd
}

// delete deletes a bucket. It writes an audit line to the log, and the result to stdout.
func (o *operation) delete(ctx context.Context, key string) error {
	if err := lua.CheckKey(key); err != nil {
		return cli.Usage(err)
	}
	cfg, err := o.load()
	if err != nil {
		return err
	}
	if slices.Contains(configuredKeys(cfg), key) {
		return fmt.Errorf("delete %q: %s still has this bucket, so replicas would create it again: remove it from the file "+
			"first", key, o.path)
	}
	return o.reach(ctx, operateTimeout, func(ctx context.Context, rdb redis.UniversalClient, server string) error {
		d, err := deleteBucket(ctx, rdb, key)
		if err := o.audited(key, server, nil, []any{"keys", d.Keys, "held", d.Tokens}, err); err != nil {
			return err
		}
		if o.output == "json" {
			return cli.WriteJSON(o.Stdout, d, "")
		}
		return line(o.Stdout,
			fmt.Sprintf("%s was deleted (%d keys; it held %d tokens)", terminal.Text(key), d.Keys, d.Tokens))
	})
}

// deleteBucket deletes a bucket's keys with one command. If there is no such bucket, it deletes nothing and returns an
// error.
func deleteBucket(ctx context.Context, rdb redis.UniversalClient, key string) (deleted, error) {
	d := deleted{Key: key}
	p, err := lua.Peek(ctx, rdb, key, 1)
	if errors.Is(err, lua.ErrUnknownBucket) || err == nil && p.Terms == nil { // it may be lazy, or have no refiller
		var others int64
		others, err = rdb.Exists(ctx, lua.IndexKey(key), lua.LazyKey(key)).Result()
		if err == nil && others == 0 {
			err = lua.ErrUnknownBucket
		}
	}
	if err != nil {
		return d, err
	}
	d.Tokens = p.Tokens
	d.Keys, err = rdb.Del(ctx, lua.TokensKey(key), lua.IndexKey(key), lua.ControlKey(key), lua.OutstandingKey(key),
		lua.DueKey(key), lua.LiveKey(key), lua.LazyKey(key), lua.FlowsKey(key), lua.UseKey(key)).Result()
	return d, err
}
