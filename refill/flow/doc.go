// Package flow decides how a bucket is divided among its flows. It takes no tokens: the scripts in package lua take
// them according to the plan.
//
// A [Planner] belongs to one bucket. Its owner reports how many tokens each flow asked for ([Planner.Observe]). It gets
// the next plan ([Planner.Plan]), and writes it with the bucket's next refill. The planner does three things:
//
//   - Demand: the tokens per second that a flow asked for, smoothed. A new planner has few observations, and divides by
//     their weight. So it counts the first demand as steady.
//   - Level: the weighted max-min part of the rate. At each level of names, the rate of a team is divided among the
//     flows and teams in it, by their demands. The largest demand counts as unlimited, since clients remember denials
//     and so ask for less than they want.
//   - List: flows whose demand exceeds half of their part. The plan lists only these. All others are served from the
//     headroom.
//
// The package uses neither Redis nor a clock; its caller does. The script flows.lua of package lua describes how a
// bucket uses a plan.
package flow
