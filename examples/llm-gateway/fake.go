package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// fakeLLM is a simulated model. It streams half of the allowed tokens. Then it sends the total number of tokens, in
// which the prompt counts as seven.
type fakeLLM struct {
	pace func(ctx context.Context, i int) error // waits for the next token
}

func fiftyMS(ctx context.Context, _ int) error {
	select {
	case <-time.After(50 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f fakeLLM) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var ask struct {
		MaxTokens int `json:"max_tokens"`
	}
	if json.NewDecoder(r.Body).Decode(&ask) != nil {
		http.Error(w, "no JSON", http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for i := range ask.MaxTokens / 2 {
		if f.pace(r.Context(), i) != nil {
			return // the client has disconnected
		}
		fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":\"word%d \"}}]}\n\n", i)
		_ = http.NewResponseController(w).Flush()
	}
	fmt.Fprintf(w, "data: {\"choices\":[],\"usage\":{\"total_tokens\":%d}}\n\ndata: [DONE]\n\n", 7+ask.MaxTokens/2)
}
