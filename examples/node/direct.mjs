// Takes tokens from Redis itself, with the scripts of the project (../scripts) and node-redis.
//
//   node direct.mjs redis://127.0.0.1:6379/0 BUCKET
import { readFile } from 'node:fs/promises'
import { createClient, defineScript } from 'redis'

const source = (name) => readFile(new URL(`../scripts/${name}.lua`, import.meta.url), 'utf8')

// script is one of the project's, of so many keys. Arguments go out as strings.
const script = async (name, keys) =>
  defineScript({
    SCRIPT: await source(name),
    NUMBER_OF_KEYS: keys,
    transformArguments: (...args) => args.map(String), // node-redis 4
    parseCommand: (parser, ...args) => parser.push(...args.map(String)), // node-redis 5
    transformReply: (reply) => reply,
  })

const [url, name] = process.argv.slice(2)
const client = createClient({
  url,
  // A script that takes must not be sent twice because its answer was lost.
  disableOfflineQueue: true,
  socket: { reconnectStrategy: false },
  scripts: { takes: await script('takes', 2), giveBack: await script('return', 3) },
})
client.on('error', (e) => console.error(e.message))
await client.connect()

// take takes n tokens of a bucket, all or nothing. wait is in microseconds until n are due, or -1.
async function take(bucket, n = 1) {
  // No bucket on its name alone, no bounds, no templates; one bucket, asked whole: without a template, which isn't
  // created, without its policy, in no line, held for nobody, with one run: one take of n tokens that leaves none.
  const reply = await client.takes(bucket, `{${bucket}}:ctl`, 0, 0, 0, 0, 0, 0, 1, n, 1, 0)
  const status = reply[1]
  if (status === 2) throw new Error(`unknown bucket '${bucket}'`)
  if (status !== 1) throw new Error(`${bucket}: another program uses the key`)
  const [left, era] = [reply[2], reply[3]]
  const [taken, wait] = reply.slice(8 + reply[7]) // reply[7] numbers of the policy, if it is told
  return { ok: taken === 1, left, era, wait }
}

// giveBack returns n tokens of an era. What the bucket can't hold is dropped.
const giveBack = async (bucket, n, era) => (await client.giveBack(bucket, `{${bucket}}`, `{${bucket}}:ctl`, n, era))[0] === 1

let answer
while ((answer = await take(name)).ok) console.log(`${name}: taken, ${answer.left} left`)
console.log(`${name}: denied, again in ${Math.round(answer.wait / 1e6)} s`)
console.log(`${name}: ${(await giveBack(name, 1, answer.era)) ? 'returned' : 'not returned'}`)
console.log(`${name}: ${(await take(name)).ok ? 'taken' : 'denied'} again`)
await take('no-such-bucket').catch((e) => console.log(e.message))
client.destroy ? client.destroy() : await client.disconnect()
