package admin

import (
	"bytes"
	"cmp"
	"context"
	"embed"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

const (
	// pageSize is the number of buckets on a page.
	pageSize = 50
	// flowsOfAll is the number of flows that a page shows for each bucket of a list. flowsOfOne is the number for a
	// page of one bucket.
	flowsOfAll = 5
	flowsOfOne = 50
)

//go:embed page
var files embed.FS

// pageTemplate is parsed once. A mistake in it makes every test and the start of the program fail.
var pageTemplate = template.Must(template.New("page.html").Funcs(template.FuncMap{
	"number":    number10,
	"count":     count,
	"decimalOf": decimal,
	"decimal":   func(f *float64) string { return decimal(*f) },
	"percent": func(f any) string {
		if p, ok := f.(*float64); ok {
			f = *p
		}
		return fmt.Sprintf("%.0f\u00a0%%", 100*f.(float64))
	},
	"age":  age,
	"rate": decimal,

	"perSecond": PerSecond,
	"span":      func(now, then time.Time) string { return age(float64(now.Sub(then).Milliseconds())) },
	"text":      terminal.Text,
	"join":      func(list []string) string { return strings.Join(list, ", ") },
}).ParseFS(files, "page/page.html"))

// view has the values that the page shows.
type view struct {
	Status
	Query          Query
	From, To       int
	Previous, Next string // URLs; empty for none
	Sorts          []sortLink
	Unsorted       bool // there are too many buckets to sort
	Beyond         bool // the offset is beyond the last bucket
	Wins, Losses   int64
}

type sortLink struct {
	Name string
	URL  string
	On   bool
}

// page serves the status page and its files.
func page(mux *http.ServeMux, src Source) {
	for _, f := range []struct{ name, kind string }{{"page.css", "text/css"}, {"page.js", "text/javascript"}} {
		content, err := files.ReadFile("page/" + f.name)
		mux.HandleFunc("GET /"+f.name, func(w http.ResponseWriter, _ *http.Request) {
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			secure(w, f.kind)
			_, _ = w.Write(content) // an error means that the client has disconnected
		})
	}
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, req *http.Request) {
		flows := flowsOfAll
		if req.URL.Query().Has("key") {
			flows = flowsOfOne
		}
		q, err := query(req, pageSize, flows)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		ctx, cancel := context.WithTimeout(req.Context(), probeTimeout)
		defer cancel()
		var out bytes.Buffer
		if err := pageTemplate.Execute(&out, newView(src.Status(ctx, q), q)); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		secure(w, "text/html")
		_, _ = out.WriteTo(w) // an error means that the client has disconnected
	})
}

// secure sets headers that make browsers load content only from this server. They also keep other pages from embedding
// this one.
func secure(w http.ResponseWriter, kind string) {
	h := w.Header()
	h.Set("Content-Type", kind+"; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "+
		"img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
}

func newView(s Status, q Query) view {
	v := view{
		Status:   s,
		Query:    q,
		To:       q.Offset + len(s.Buckets),
		Unsorted: q.Sort != SortConfig && q.Sort != SortKey && s.Found > MaxSorted,
	}
	v.From = min(q.Offset+1, v.To)
	v.Beyond = s.Found > 0 && len(s.Buckets) == 0
	switch {
	case v.Beyond:
		v.Previous = link(q, q.Sort, (s.Found-1)/q.Limit*q.Limit)
	case q.Offset > 0:
		v.Previous = link(q, q.Sort, max(0, q.Offset-q.Limit))
	}
	if v.To < s.Found && len(s.Buckets) > 0 {
		v.Next = link(q, q.Sort, v.To)
	}
	names := []string{"As configured", "Bucket", "Fill", "Taken", "Refilled"}
	for i, sort := range sorts {
		v.Sorts = append(v.Sorts, sortLink{Name: names[i], URL: link(q, sort, 0), On: q.Sort == sort})
	}
	for status, n := range s.Calls {
		switch status {
		case "stale", "early":
			v.Losses += n
		case "unknown", "malformed":
		default:
			v.Wins += n
		}
	}
	return v
}

// link returns the page's URL with another order and offset.
func link(q Query, sort Sort, offset int) string {
	form := url.Values{}
	set := func(name, value string) {
		if value != "" && value != "0" {
			form.Set(name, value)
		}
	}
	set("key", q.Key)
	set("q", q.Search)
	set("sort", string(sort))
	set("offset", strconv.Itoa(offset))
	if q.Flows != flowsOfAll && q.Key == "" || q.Flows != flowsOfOne && q.Key != "" {
		set("flows", strconv.Itoa(q.Flows))
	}
	if q.Limit != pageSize {
		set("limit", strconv.Itoa(q.Limit))
	}
	return "?" + form.Encode()
}

// Divided returns the shown buckets that are divided among flows.
func (v view) Divided() []Bucket {
	var list []Bucket
	for _, b := range v.Buckets {
		if b.Flows != nil {
			list = append(list, b)
		}
	}
	return list
}

// OfBucket returns the page's URL for one bucket.
func (v view) OfBucket(key string) string { return "?" + url.Values{"key": {key}}.Encode() }

// Most returns the highest rate that a flow of the list got. It returns at least 1.
func (f Flows) Most() float64 {
	most := 1.0
	for _, one := range f.List {
		most = max(most, one.Got)
	}
	return most
}

// number10 formats a whole number with narrow spaces between thousands.
func number10(n any) string {
	s := fmt.Sprint(n)
	digits := strings.TrimPrefix(s, "-")
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "\u202f" + digits[i:]
	}
	if len(s) > 0 && s[0] == '-' {
		return "-" + digits
	}
	return digits
}

// count returns a number with its noun, in the plural unless the number is 1.
func count(n any, thing string) string {
	s := number10(n)
	if s != "1" {
		thing += "s"
	}
	return s + " " + thing
}

// Held returns the numbers of buckets, pools and templates in the configuration, as text.
func (v view) Held() string {
	var held []string
	for _, of := range []struct {
		n     int
		thing string
	}{{v.Total - v.Pooled, "bucket"}, {v.Pooled, "pool"}, {len(v.Templates), "template"}} {
		if of.n > 0 {
			held = append(held, count(of.n, of.thing))
		}
	}
	return cmp.Or(strings.Join(held, ", "), "no bucket")
}

func decimal(f float64) string {
	if f >= 100 {
		return number10(int64(f + 0.5))
	}
	return strconv.FormatFloat(f, 'f', 1, 64)
}

// age formats a time in milliseconds for people.
func age(ms float64) string {
	switch d := time.Duration(ms * float64(time.Millisecond)); {
	case d < time.Second:
		return fmt.Sprintf("%d\u00a0ms", max(0, d.Milliseconds()))
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f\u00a0s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f\u00a0s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f\u00a0min", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.0f\u00a0h", d.Hours())
	default:
		return fmt.Sprintf("%.0f\u00a0days", d.Hours()/24)
	}
}
