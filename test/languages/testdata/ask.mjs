// Makes one call of the client and prints its answer: node ask.mjs URL FALLBACK METHOD ARGUMENT...
import { Sidecar } from '../../../examples/node/refiller.mjs'

const [url, fallback, method, ...args] = process.argv.slice(2)
const sidecar = new Sidecar({ url, fallback, timeout: 1000 })
try {
  const calls = { take: 'take', take_limit: 'takeLimit', take_all: 'takeAll', check: 'check' }
  console.log(JSON.stringify(await sidecar[calls[method]](...args.map((a) => JSON.parse(a)))))
} catch (e) {
  console.log(JSON.stringify({ error: e.message }))
}
sidecar.close()
