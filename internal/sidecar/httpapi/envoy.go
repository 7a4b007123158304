package httpapi

import (
	"context"
	"fmt"
	"net/http"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
)

// envoyPath is the path at which Envoy's reference service answers requests in JSON, for programs without gRPC.
const envoyPath = "/json"

// EnvoyDoor handles a request to Envoy's rate limit service.
type EnvoyDoor func(context.Context, *rls.RateLimitRequest) (*rls.RateLimitResponse, error)

// envoy handles a request to Envoy's rate limit service in JSON. The status is 200, or 429 if the request is over
// limit.
func (h *Handler) envoy(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		RefuseMethod(w, http.MethodPost, h.config.Logger)
		return
	}
	res, err := h.decide(w, r)
	if err != nil {
		Fail(w, err, h.config.Logger)
		return
	}
	status := http.StatusOK
	if res.GetOverallCode() == rls.RateLimitResponse_OVER_LIMIT {
		status = http.StatusTooManyRequests
	}
	body, err := protojson.Marshal(res)
	if err != nil {
		Fail(w, fmt.Errorf("sidecar: encode the response: %w", err), h.config.Logger)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(body) // an error means that the client has disconnected
}

func (h *Handler) decide(w http.ResponseWriter, r *http.Request) (*rls.RateLimitResponse, error) {
	body, err := h.body(w, r)
	if err != nil {
		return nil, err
	}
	req := new(rls.RateLimitRequest)
	if err := protojson.Unmarshal(body, req); err != nil {
		return nil, fmt.Errorf("%w: %w", call.ErrBadRequest, err)
	}
	if err := call.Await(r.Context(), call.Asks{Key: envoy.Key(req), Size: len(body)}); err != nil {
		return nil, err
	}
	return h.config.Envoy(r.Context(), req)
}
