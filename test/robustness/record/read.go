package record

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"

	"github.com/tokenrefill/refiller/policy"
)

// ReadLines reads all records of a file. It skips a last line without a newline: a writer that was killed may leave an
// incomplete line.
func ReadLines[T any](path string) ([]T, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	var records []T
	for n := 1; ; n++ {
		line, rest, whole := bytes.Cut(data, []byte("\n"))
		if !whole {
			return records, nil
		}
		var v T
		if err := json.Unmarshal(line, &v); err != nil {
			return nil, fmt.Errorf("record: %s:%d: %w", path, n, err)
		}
		records, data = append(records, v), rest
	}
}

// Call returns the call that was made. It fails if the terms can't be decoded.
func (r Refill) Call() (policy.Call, error) {
	c := policy.Call{Version: policy.Version{Era: r.Era, Index: r.Index}, Create: policy.Create(r.Create), Step: r.Step,
		Next: r.Next}
	if r.Terms != "" {
		t, err := policy.DecodeTerms(r.Terms)
		if err != nil {
			return policy.Call{}, err
		}
		c.Terms = &t
	}
	return c, nil
}
