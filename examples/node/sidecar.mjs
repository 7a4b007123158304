// Takes tokens through the sidecar: consumer serve --limits limits.yaml. Nothing but Node is needed.
//
//   node sidecar.mjs http://127.0.0.1:8080 BUCKET LIMIT KEY
import { setTimeout as sleep } from 'node:timers/promises'

// A denial is an answer with ok false; what fails is an Error with a code.
class Sidecar {
  constructor(url, timeout = 2000) {
    Object.assign(this, { url, timeout })
  }

  async call(path, body) {
    const response = await fetch(this.url + path, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify(body),
      signal: AbortSignal.timeout(this.timeout),
    })
    const answer = await response.json()
    if (!response.ok) throw new Error(`${response.status} ${answer.code}: ${answer.message}`)
    return answer
  }

  take(bucket, tokens = 1) {
    return this.call('/v1/take', { key: bucket, tokens })
  }

  takeFrom(limit, key, tokens = 1) {
    return this.call(`/v1/limits/${limit}/take`, { key, tokens })
  }
}

const [url, bucket, limit, key] = process.argv.slice(2)
const sidecar = new Sidecar(url)

let answer
while ((answer = await sidecar.take(bucket)).ok) console.log(`${bucket}: taken, ${answer.remaining} left`)
console.log(`${bucket}: denied, again in ${Math.round(answer.retry_after_ms / 1000)} s`)

answer = await sidecar.takeFrom(limit, key)
if (answer.ok) await sleep(answer.wait_ms) // a limit of pacing says when
console.log(`${limit}: ${answer.ok ? 'taken' : 'denied'}, ${answer.remaining} left`)

const jobs = bucket + '-jobs'
const reservation = await sidecar.call('/v1/reserve', { key: jobs, tokens: 5, ttl_ms: 60_000 })
const settled = await sidecar.call('/v1/settle', { key: jobs, id: reservation.id, used: 3 })
console.log(`${jobs}: reserved 5, used 3, ${settled.returned} returned`)

await sidecar.take('no-such-bucket').catch((e) => console.log(e.message))
