package operate

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// browser is one tab of a headless Chromium. The tests control it with the DevTools protocol.
type browser struct {
	t       *testing.T
	conn    *websocket.Conn
	session string
	id      int
	wrong   []string // messages and errors of the console, and requests to other hosts
}

// message is a message of the protocol: a command, an answer or an event.
type message struct {
	ID        int                       `json:"id,omitempty"`
	SessionID string                    `json:"sessionId,omitempty"`
	Method    string                    `json:"method,omitempty"`
	Params    any                       `json:"params,omitempty"`
	Result    json.RawMessage           `json:"result,omitempty"`
	Error     *struct{ Message string } `json:"error,omitempty"`
}

func openBrowser(t *testing.T) *browser {
	t.Helper()
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if p, err := lookPath(name); err == nil {
			path = p
			break
		}
	}
	require.NotEmpty(t, path, "scripts/require.sh chromium installs it")
	p := testenv.Start(t, path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
		"--hide-scrollbars", "--no-first-run",
		"--remote-debugging-port=0", "--user-data-dir="+t.TempDir(), "about:blank")
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	found, err := p.WaitLog(ctx, regexp.MustCompile(`DevTools listening on (ws://\S+)`))
	require.NoError(t, err)
	conn, res, err := websocket.DefaultDialer.DialContext(ctx, found[1], nil)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	t.Cleanup(func() {
		_ = conn.Close()
		p.Kill()
	})
	b := &browser{t: t, conn: conn}
	var target struct{ TargetID string }
	b.do("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var session struct{ SessionID string }
	b.do("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &session)
	b.session = session.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		b.do(domain+".enable", nil, nil)
	}
	return b
}

// do sends a command and waits for its answer. Meanwhile it adds messages of the
// console to wrong.
func (b *browser) do(method string, params, result any) {
	b.t.Helper()
	b.id++
	if params == nil {
		params = struct{}{}
	}
	require.NoError(b.t, b.conn.WriteJSON(message{ID: b.id, SessionID: b.session, Method: method, Params: params}))
	require.NoError(b.t, b.conn.SetReadDeadline(time.Now().Add(patience)))
	for {
		_, data, err := b.conn.ReadMessage()
		require.NoError(b.t, err, method)
		var m message
		require.NoError(b.t, json.Unmarshal(data, &m))
		switch {
		case m.Method == "Runtime.exceptionThrown", m.Method == "Log.entryAdded", m.Method == "Runtime.consoleAPICalled":
			b.wrong = append(b.wrong, string(data))
		case m.Method == "Network.requestWillBeSent":
			var sent struct {
				Params struct{ Request struct{ URL string } }
			}
			require.NoError(b.t, json.Unmarshal(data, &sent))
			if u := sent.Params.Request.URL; !strings.HasPrefix(u, "http://127.0.0.1:") && !strings.HasPrefix(u, "data:") {
				b.wrong = append(b.wrong, "asks "+u)
			}
		case m.ID == b.id:
			require.Nil(b.t, m.Error, "%s", data)
			if result != nil {
				require.NoError(b.t, json.Unmarshal(m.Result, result))
			}
			return
		}
	}
}

// eval evaluates a JavaScript expression in the page.
func (b *browser) eval(expression string, result any) {
	b.t.Helper()
	var answer struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails any
	}
	b.do("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true},
		&answer)
	require.Nil(b.t, answer.ExceptionDetails, expression)
	if result != nil {
		require.NoError(b.t, json.Unmarshal(answer.Result.Value, result), "%s: %s", expression, answer.Result.Value)
	}
}

// until waits until a JavaScript expression is true in the page.
func (b *browser) until(expression string) {
	b.t.Helper()
	eventually(b.t, func() bool {
		var is bool
		b.eval("!!("+expression+")", &is)
		return is
	}, patience, 50*time.Millisecond, expression)
}

// open loads a page in a window with a size and a colour scheme.
func (b *browser) open(url string, width, height int, scheme string) {
	b.t.Helper()
	b.do("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1,
		"mobile": width < 500}, nil)
	b.do("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme",
		"value": scheme}}}, nil)
	b.do("Page.navigate", map[string]any{"url": url}, nil)
	b.until(`location.href == ` + string(must(json.Marshal(url))) + ` && document.readyState == "complete"`)
}

func must(data []byte, err error) []byte {
	if err != nil {
		panic(err) // can't happen: every string can be encoded in JSON
	}
	return data
}

// press presses and releases a key.
func (b *browser) press(key, text string) {
	b.t.Helper()
	down := map[string]any{"type": "keyDown", "key": key}
	if text != "" {
		down["text"] = text
	}
	if key == "Tab" {
		down["windowsVirtualKeyCode"] = 9
	}
	b.do("Input.dispatchKeyEvent", down, nil)
	b.do("Input.dispatchKeyEvent", map[string]any{"type": "keyUp", "key": key}, nil)
}

// shot makes a picture of the window. It writes the picture to the directory in
// REFILLER_SCREENSHOTS if that is set.
func (b *browser) shot(name string) {
	b.t.Helper()
	dir := os.Getenv("REFILLER_SCREENSHOTS")
	var picture struct{ Data string }
	b.do("Page.captureScreenshot", map[string]any{"format": "png"}, &picture)
	data, err := base64.StdEncoding.DecodeString(picture.Data)
	require.NoError(b.t, err)
	require.NotEmpty(b.t, data)
	if dir != "" {
		require.NoError(b.t, os.WriteFile(filepath.Join(dir, name+".png"), data, 0o600))
	}
}
