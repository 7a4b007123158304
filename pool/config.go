package pool

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// Limits of the settings' record in etcd, under the key cfg. The record is text that people can read. A record of more
// than maxText bytes is compressed. etcd accepts requests of up to 1.5 MiB.
const (
	maxText     = 256 << 10 // bytes of a record that isn't compressed
	maxSettings = 1 << 20   // bytes in etcd
	maxInflated = 64 << 20  // bytes of text after it was decompressed
)

// Settings are the pools that all regions share, at one version. The settings with the highest version that any replica
// has are in force.
type Settings struct {
	Version int64 // 0 or more; raise it with every change
	Pools   []Pool
}

// noSettings are settings without pools that are older than all others.
var noSettings = Settings{Version: -1}

// Validate returns an error that lists all problems of s, or nil.
func (s Settings) Validate() error {
	var errs []error
	seen := map[string]bool{}
	for _, p := range s.Pools {
		if err := p.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("pool %q: %w", p.Name, err))
		}
		if seen[p.Name] {
			errs = append(errs, fmt.Errorf("%w %q: it is there twice", ErrPool, p.Name))
		}
		seen[p.Name] = true
	}
	if s.Version < 0 {
		errs = append(errs, fmt.Errorf("%w: version %d is below 0", ErrPool, s.Version))
	}
	if n := len(s.record()); n > maxSettings {
		errs = append(errs, fmt.Errorf("%w: the pools take %d bytes in etcd: want at most %d", ErrPool, n, maxSettings))
	}
	return errors.Join(errs...)
}

// record returns the settings as they are stored in etcd.
func (s Settings) record() string {
	text := s.encode()
	if len(text) <= maxText {
		return text
	}
	var b strings.Builder
	w := gzip.NewWriter(&b)
	_, err := io.WriteString(w, text)
	err = errors.Join(err, w.Close())
	if err != nil {
		panic(err) // a write to a strings.Builder never fails
	}
	return b.String()
}

// inflate undoes the compression of a record, if there is any.
func inflate(record string) (string, error) {
	if !strings.HasPrefix(record, "\x1f\x8b") {
		return record, nil
	}
	r, err := gzip.NewReader(strings.NewReader(record))
	if err != nil {
		return "", err
	}
	text, err := io.ReadAll(io.LimitReader(r, maxInflated))
	return string(text), err
}

// Equal reports whether both settings have the same meaning. Their order doesn't matter, and 1/s and 60/m are equal
// rates.
func (s Settings) Equal(other Settings) bool { return s.reduced().encode() == other.reduced().encode() }

// following returns a copy of s that has the field since of each region. before has the settings that s replaces. A
// region that was in its pool before keeps its value. Any other region joins the pool with the version of s.
func (s Settings) following(before Settings) Settings {
	type member struct{ pool, region string }
	since := map[member]int64{}
	for _, p := range before.Pools {
		for _, r := range p.Regions {
			since[member{p.Name, r.Name}] = r.since
		}
	}
	s = s.clone()
	for _, p := range s.Pools {
		for i := range p.Regions {
			r, is := &p.Regions[i], false
			r.since, is = since[member{p.Name, r.Name}]
			if !is {
				r.since = s.Version
			}
		}
	}
	return s
}

func (s Settings) clone() Settings {
	s.Pools = slices.Clone(s.Pools)
	for i := range s.Pools {
		s.Pools[i].Regions = slices.Clone(s.Pools[i].Regions)
	}
	return s
}

// reduced returns s with its rates in lowest terms, and without its history.
func (s Settings) reduced() Settings {
	s = s.clone()
	for i := range s.Pools {
		p := &s.Pools[i]
		p.Rate = p.Rate.Reduced()
		for j := range p.Regions {
			r := &p.Regions[j]
			r.Floor = r.Floor.Reduced()
			r.Ceiling = r.Ceiling.Reduced()
			r.since = 0
		}
	}
	return s
}

// The types of the settings' record, in JSON.
type (
	settingsRecord struct {
		Version int64        `json:"version"`
		Pools   []poolRecord `json:"pools"`
	}
	poolRecord struct {
		Name       string         `json:"name"`
		Rate       string         `json:"rate"`
		Capacity   int64          `json:"capacity"`
		Interval   string         `json:"interval"`
		FloorShare int64          `json:"floor_share,omitempty"` // percent; DefaultFloorShare if it is left out
		Regions    []regionRecord `json:"regions"`
	}
	regionRecord struct {
		Name    string `json:"name"`
		Weight  int64  `json:"weight"`
		Floor   string `json:"floor,omitempty"`
		Burst   int64  `json:"burst,omitempty"`
		Ceiling string `json:"ceiling,omitempty"`
		Since   int64  `json:"since,omitempty"` // the version with which the region joined the pool
	}
)

// encode returns the text of the settings. Equal settings have equal texts.
func (s Settings) encode() string {
	rate := func(r policy.Rate) string {
		if r == (policy.Rate{}) {
			return ""
		}
		return r.String()
	}
	rec := settingsRecord{Version: s.Version, Pools: []poolRecord{}}
	for _, p := range s.Pools {
		pr := poolRecord{Name: p.Name, Rate: p.Rate.String(), Capacity: p.Capacity, Interval: p.interval().String()}
		if p.floorShare() != DefaultFloorShare {
			pr.FloorShare = p.floorShare()
		}
		for _, r := range p.Regions {
			pr.Regions = append(pr.Regions, regionRecord{r.Name, r.Weight, rate(r.Floor), r.Burst, rate(r.Ceiling), r.since})
		}
		slices.SortFunc(pr.Regions, func(a, b regionRecord) int { return strings.Compare(a.Name, b.Name) })
		rec.Pools = append(rec.Pools, pr)
	}
	slices.SortFunc(rec.Pools, func(a, b poolRecord) int { return strings.Compare(a.Name, b.Name) })
	b, err := json.Marshal(rec)
	if err != nil {
		panic(err) // encoding strings and integers never fails
	}
	return string(b)
}

func decodeSettings(text string) (Settings, error) {
	var rec settingsRecord
	text, err := inflate(text)
	if err == nil {
		err = json.Unmarshal([]byte(text), &rec)
	}
	s := Settings{Version: rec.Version}
	rate := func(text string) (r policy.Rate) {
		if text != "" && err == nil {
			r, err = policy.ParseRate(text)
		}
		return r
	}
	for _, pr := range rec.Pools {
		p := Pool{Name: pr.Name, Rate: rate(pr.Rate), Capacity: pr.Capacity, FloorShare: pr.FloorShare}
		if err == nil {
			p.Interval, err = time.ParseDuration(pr.Interval)
		}
		for _, r := range pr.Regions {
			p.Regions = append(p.Regions, Region{r.Name, r.Weight, rate(r.Floor), r.Burst, rate(r.Ceiling), r.Since})
		}
		s.Pools = append(s.Pools, p)
	}
	if err == nil {
		err = s.Validate()
	}
	if err != nil {
		return Settings{}, fmt.Errorf("%w: settings: %w", ErrRecord, err)
	}
	return s, nil
}
