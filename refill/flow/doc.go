// Package flow decides how a bucket is divided among its flows. It takes no tokens: the scripts in package lua do,
// according to the plan.
//
// A [Planner] belongs to one bucket. Its owner reports how many tokens each flow asked for ([Planner.Observe]). It gets
// the next plan ([Planner.Plan]), and writes it with the bucket's next refill. The planner does three things:
//
//   - Demand: what a flow asked for per second, smoothed. A successor that has seen little divides by the weight of
//     what it has seen, so that it takes the first demand as steady.
//   - Level: the weighted max-min part of the rate. At each level of names the demands of the flows and teams there
//     divide what their team has. The largest demand counts as unlimited, since clients remember denials and so ask
//     for less than they want.
//   - List: flows whose demand exceeds half of their part. The plan lists only these. All others are served from the
//     headroom.
//
// The package uses neither Redis nor a clock; its caller does. The script flows.lua states how a bucket uses a plan.
package flow
