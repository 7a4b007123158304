// @ts-check
// Takes tokens through the sidecar: consumer serve --limits limits.yaml. Nothing but Node is needed.
//
//   node sidecar.mjs http://127.0.0.1:8080 BUCKET LIMIT KEY
import { setTimeout as sleep } from 'node:timers/promises'
import { Sidecar } from './refiller.mjs'

const [url, bucket, limit, key] = process.argv.slice(2)
const sidecar = new Sidecar({ url, timeout: 5000, fallback: 'closed' })

let answer
while ((answer = await sidecar.take(bucket)).ok) console.log(`${bucket}: taken, ${answer.remaining} left`)
console.log(`${bucket}: denied, again in ${Math.round((answer.retry_after_ms ?? 0) / 1000)} s`)

const place = await sidecar.takeLimit(limit, key)
if (place.ok) await sleep(place.wait_ms) // a limit of pacing says when
console.log(`${limit}: ${place.ok ? 'taken' : 'denied'}, ${place.remaining} left`)

const jobs = bucket + '-jobs'
const reservation = await sidecar.reserve(jobs, { tokens: 5, ttl_ms: 60_000 })
if (reservation.id) {
  const settled = await sidecar.settle(jobs, reservation.id, 3)
  console.log(`${jobs}: reserved 5, used 3, ${settled.returned} returned`)
}

await sidecar.take('no-such-bucket').catch((e) => console.log(e.message))
sidecar.close()
