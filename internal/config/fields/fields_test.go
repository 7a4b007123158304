package fields_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/fields"
)

type server struct {
	Address  string        `yaml:"address,required" is:"address" env:"URL"`
	Password string        `yaml:"password_file" is:"address" env:"PASSWORD_FILE"`
	Timeout  time.Duration `yaml:"timeout" is:"timeout" default:"2s"`
}

type shape struct {
	Server  server   `yaml:"server" env:"SERVER_"`
	Other   *server  `yaml:"other" env:"OTHER_"`
	Members []string `yaml:"members" is:"address" env:"MEMBERS"`
	Rooms   []room   `yaml:"rooms"`
	Parts   []part   `yaml:"parts"`
}

type room struct {
	Name string `yaml:"name,required" is:"address"`
	Size int    `yaml:"size" is:"size" default:"1"`
}

type part struct {
	Name   string `yaml:",key" is:"address"`
	Weight int    `yaml:"weight" is:"size" default:"3"`
}

var kinds = fields.Kinds{
	"address": fields.Text("an address", nil), "size": fields.Integer(0, 9), "timeout": fields.Duration(0, time.Minute, 1),
}

func TestALaterLayerCountsMore(t *testing.T) {
	t.Parallel()
	var s shape
	d := fields.New(kinds, &s)
	require.True(t, d.Read("file", []byte("server: {address: a, timeout: soon}\nrooms: [{size: 10}, {name: x}]\nparts: {p: , q: {weight: 1}}\n")))
	shared := fields.New(kinds, &shape{})
	require.True(t, shared.Read("shared", []byte("rooms: [{name: y, size: 2}]\n")))
	d.AddDocument(shared)
	d.AddEnvironment(fields.EnvironmentOf([]string{"REFILLER_SERVER_URL=b", "REFILLER_OTHER_URL=c",
		"REFILLER_MEMBERS=m, n", "REFILLER_SERVER_PASSWORD="}))
	d.AddValue(fields.Override{Source: "--server", Field: "server.address", Value: "d"})
	d.Require()
	require.EqualError(t, d.Err(), `file:1:31: server.timeout: "soon" is not a duration from 0s to 1m, such as 100ms or 5s`,
		"errors in replaced values are not reported")
	require.Equal(t, shape{
		Server: server{Address: "d", Timeout: 2 * time.Second}, Other: &server{Address: "c", Timeout: 2 * time.Second},
		Members: []string{"m", "n"}, Rooms: []room{{"y", 2}}, Parts: []part{{"p", 3}, {"q", 1}},
	}, s)

	require.Equal(t, "in --server", d.Where(fields.Path{"server", "address"}))
	require.Equal(t, "on line 1 of shared", d.Where(fields.Path{"rooms"}.Item(0).Field("size")))
	require.Equal(t, "on line 3", d.Where(fields.Path{"parts", "q"}))
	require.False(t, d.Valid(fields.Path{"server"}))
	require.True(t, d.Valid(fields.Path{"rooms"}))
}

func TestWhatIsMissingInAllLayersIsReported(t *testing.T) {
	t.Parallel()
	var s shape
	d := fields.New(kinds, &s)
	d.Read("file", []byte("server:\nother: {timeout: 1s}\nrooms: [{size: 2}]\n"))
	d.Require()
	require.EqualError(t, d.Err(), "file:1:8: server.address: it is required, here or in REFILLER_SERVER_URL: want an address\n"+
		"file:2:8: other.address: it is required, here or in REFILLER_OTHER_URL: want an address\n"+
		"file:3:9: rooms[0].name: it is required: want an address")
}

func TestAFlagIsNamedAfterItsVariable(t *testing.T) {
	t.Parallel()
	var flags []string
	for _, v := range fields.New(kinds, &shape{}).Variables() {
		flags = append(flags, v.Flag())
	}
	require.Equal(t, []string{"server", "server-password-file", "", "other", "other-password-file", "", "members"}, flags,
		"a variable that holds a password has no flag, hence the empty names")
}

func TestSuggestionsAreCloseWords(t *testing.T) {
	t.Parallel()
	words := []string{"url", "username", "timeout"}
	for typed, want := range map[string]string{"ulr": "url", "usrname": "username", "timeot": "timeout",
		"tiemout": "timeout", "x": "", "password": ""} {
		require.Equal(t, want, fields.Closest(typed, words), typed)
	}
}

func TestShownTextIsSafeAndShort(t *testing.T) {
	t.Parallel()
	require.Equal(t, `"a\x1b[31m"`, fields.Quote("a\x1b[31m"))
	require.Equal(t, `"a\nb"`, fields.Brief("a\nb"))
	require.Equal(t, "plain", fields.Brief("plain"))
	require.Len(t, fields.Brief(string(make([]rune, 1000))), len(`""`)+64*len(`\x00`)+len("..."))
	require.Equal(t, "buckets[3].rate", fields.Path{"buckets"}.Item(3).Field("rate").String())
}
