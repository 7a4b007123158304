// Takes from bucket load until standard input ends, and prints how many takes got which answer: node load.mjs URL
import { Sidecar } from '../../../examples/node/refiller.mjs'

const sidecar = new Sidecar({ url: process.argv[2], timeout: 500 })
let stop = false
process.stdin.on('end', () => (stop = true)).resume()
const sources = { shared: 0, fallback: 0 }
async function load() {
  while (!stop) {
    const { source } = await sidecar.take('load')
    sources[source.split(':')[0]]++
  }
}
await Promise.all(Array.from({ length: 8 }, load))
console.log(JSON.stringify(sources))
sidecar.close()
