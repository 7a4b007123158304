package redisconn

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/fields"
)

// Default ports.
const (
	defaultPort         = "6379"
	defaultSentinelPort = "26379"
)

// maxDB is the highest database number of any server's configuration.
const maxDB = 1<<31 - 1

// Forms lists the forms of a URL, for messages.
const Forms = "redis://host:port/db, rediss://host:port/db, unix:///path, redis-sentinel://host:port,.../master or redis-cluster://host:port,..."

// ErrURL is returned for an address that is none of the forms of the package documentation.
var ErrURL = errors.New("redisconn: bad url")

// Kind is the way in which a server is reached.
type Kind int

// Kinds of addresses.
const (
	Single Kind = iota
	Unix
	Sentinel
	Cluster
)

// URL is a parsed address. It prints in the form that it was parsed from, with the password masked.
type URL struct {
	Kind     Kind
	TLS      bool
	Addrs    []string // host:port; for Unix the path
	Master   string   // for Sentinel
	DB       int
	Username string
	Password credential.Password
}

var schemes = map[string]URL{
	"redis":           {Kind: Single},
	"rediss":          {Kind: Single, TLS: true},
	"unix":            {Kind: Unix},
	"redis-sentinel":  {Kind: Sentinel},
	"rediss-sentinel": {Kind: Sentinel, TLS: true},
	"redis-cluster":   {Kind: Cluster},
	"rediss-cluster":  {Kind: Cluster, TLS: true},
}

// ParseURL reads an address. Its errors match ErrURL and show no password.
func ParseURL(s string) (URL, error) {
	u, err := parse(s)
	if err != nil {
		return URL{}, fmt.Errorf("%w %q: %w", ErrURL, credential.Redact(s), err)
	}
	return u, nil
}

func parse(s string) (URL, error) {
	scheme, rest, found := strings.Cut(s, "://")
	u, known := schemes[strings.ToLower(scheme)]
	if !found || !known {
		return URL{}, fmt.Errorf("want %s", Forms)
	}
	end := strings.IndexAny(rest, "/?#")
	if end < 0 {
		end = len(rest)
	}
	authority, tail := rest[:end], rest[end:]
	user, hosts := "", authority
	if at := strings.LastIndexByte(authority, '@'); at >= 0 {
		user, hosts = authority[:at+1], authority[at+1:]
	} else if strings.Contains(tail, "@") && u.Kind != Unix {
		return URL{}, errors.New("special characters in the user and password must be percent-encoded")
	}

	// Package url can't parse a list of hosts. So it parses the URL with a single host h in the place of the list.
	parsed, err := url.Parse("x://" + user + "h" + tail)
	if err != nil {
		return URL{}, errors.New(
			"it can't be parsed: special characters in the user, password and path must be percent-encoded")
	}
	if parsed.Fragment != "" || strings.HasSuffix(s, "#") {
		return URL{}, errors.New("it must not have a fragment (#)")
	}
	if parsed.User != nil {
		u.Username = parsed.User.Username()
		if password, set := parsed.User.Password(); set {
			u.Password = credential.Plain(password)
		}
	}
	if err := u.setPath(parsed, hosts); err != nil {
		return URL{}, err
	}
	err = u.setAddrs(hosts)
	return u, err
}

// setPath sets the socket or the master, and the database, from the path and the query.
func (u *URL) setPath(parsed *url.URL, hosts string) error {
	db, err := queryDB(parsed.RawQuery)
	if err != nil {
		return err
	}
	path, pathDB := strings.TrimPrefix(parsed.Path, "/"), ""
	switch u.Kind {
	case Unix:
		if hosts != "" || path == "" {
			return errors.New("want unix:///path/to/socket")
		}
		u.Addrs = []string{parsed.Path}
	case Sentinel:
		u.Master, pathDB, _ = strings.Cut(path, "/")
		if u.Master == "" {
			return errors.New("it needs the name of the master: redis-sentinel://host:port,.../master")
		}
	default:
		pathDB = path
	}
	switch {
	case pathDB != "" && db != "":
		return errors.New("db is given twice")
	case pathDB == "" && db == "":
		return nil
	}
	n, err := strconv.ParseUint(pathDB+db, 10, 31)
	if err != nil {
		return errDB
	}
	u.DB = int(n)
	if u.Kind == Cluster && n != 0 {
		return errors.New("a Redis Cluster has only database 0")
	}
	return nil
}

var errDB = fmt.Errorf("db must be a whole number from 0 to %d", maxDB)

// queryDB returns the value of db, the only parameter of a query, or "" if it is missing.
func queryDB(raw string) (db string, err error) {
	query, err := url.ParseQuery(raw)
	if err != nil {
		return "", errors.New("its query can't be parsed: the only query parameter is db")
	}
	for name, values := range query {
		if name != "db" || len(values) > 1 {
			return "", errors.New("the only query parameter is db, at most once")
		}
		db = values[0]
		if db == "" {
			return "", errDB
		}
	}
	return db, nil
}

// setAddrs sets the addresses from the hosts. A socket has no hosts.
func (u *URL) setAddrs(hosts string) error {
	if u.Kind == Unix {
		return nil
	}
	port, list := defaultPort, strings.Split(hosts, ",")
	if u.Kind == Sentinel {
		port = defaultSentinelPort
	}
	if u.Kind == Single && len(list) > 1 {
		return errors.New("want one address: for several use redis-sentinel:// or redis-cluster://")
	}
	for _, host := range list {
		addr, err := address(host, port)
		if err != nil {
			return err
		}
		u.Addrs = append(u.Addrs, addr)
	}
	return nil
}

// address adds the default port to host[:port] if it is missing, and checks both parts.
func address(s, port string) (string, error) {
	host := s
	if h, p, err := net.SplitHostPort(s); err == nil {
		host, port = h, p
	} else if strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") {
		host = s[1 : len(s)-1]
	}
	if !fields.IsHost(host) {
		return "", fmt.Errorf("%q is not a host name or IP address, with :port if it is not %s", s, port)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", fmt.Errorf("port %q is not a whole number from 1 to 65535", port)
	}
	return net.JoinHostPort(host, port), nil
}

// String returns the address with the password masked.
func (u URL) String() string {
	var b strings.Builder
	for scheme, form := range schemes {
		if form.Kind == u.Kind && form.TLS == u.TLS {
			b.WriteString(scheme)
		}
	}
	b.WriteString("://")
	if !u.Password.IsZero() || u.Username != "" {
		b.WriteString(url.PathEscape(u.Username) + ":" + credential.Mask + "@")
	}
	if u.Kind == Unix && len(u.Addrs) > 0 {
		b.WriteString((&url.URL{Path: u.Addrs[0]}).EscapedPath())
	} else {
		b.WriteString(strings.Join(u.Addrs, ","))
	}
	if u.Master != "" {
		b.WriteString("/" + url.PathEscape(u.Master))
	}
	if u.DB != 0 {
		b.WriteString("?db=" + strconv.Itoa(u.DB))
	}
	return b.String()
}

// GoString masks the password under %#v too.
func (u URL) GoString() string { return "redisconn.URL(" + u.String() + ")" }

// MarshalText masks the password in JSON and structured logs.
func (u URL) MarshalText() ([]byte, error) { return []byte(u.String()), nil }
