package sidecar

import (
	"bytes"
	"testing"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// rawCodec sends bytes as they are.
type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error) { return v.([]byte), nil }

func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = data
	return nil
}

func (rawCodec) Name() string { return "proto" }

// A value that is not UTF-8 doesn't turn off the other limits of its request.
func TestAValueThatIsNotUTF8IsLimited(t *testing.T) {
	t.Parallel()
	b, _ := envoyBench(t, nil)
	data, err := proto.Marshal(request(0, of("remote_address", "10.0.0.2"), of("path", "VALUE")))
	require.NoError(t, err)
	data = bytes.Replace(data, []byte("VALUE"), []byte("/v1/\xff"), 1)
	conn := b.dial()
	for _, want := range []rls.RateLimitResponse_Code{codeOK, codeOK, codeOK, over} {
		var reply []byte
		err := conn.Invoke(t.Context(), rls.RateLimitService_ShouldRateLimit_FullMethodName, data, &reply,
			grpc.ForceCodec(rawCodec{}))
		require.NoError(t, err)
		var res rls.RateLimitResponse
		require.NoError(t, proto.Unmarshal(reply, &res))
		require.Equal(t, want, res.GetOverallCode())
	}
}

func TestTextsThatAreNotUTF8StayDifferent(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"é %FF": "é %FF", "é\xff": "é%FF", "é\xfe": "é%FE", "%FF\xff": "%25FF%FF", "\xff\xff": "%FF%FF",
		"\uFFFD\xff": "\uFFFD%FF",
	} {
		require.Equal(t, want, escapeText(text))
	}
}
