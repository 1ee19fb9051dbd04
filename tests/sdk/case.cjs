'use strict';
// One case at a time: run it, and say in one line how it went. For the Node programs of the suite.

const assert = require('node:assert/strict');
const { randomUUID } = require('node:crypto');

// What suite.py tells its programs: the proxy's URL, the upstream's, this SDK's keys, and the pieces of the scripted text.
const suite = JSON.parse(process.env.SDK_SUITE);
suite.text = suite.pieces.join('');

// The tiny tier has room for two. On a very slow machine room may appear again before a third call, so a few more are tried.
const MOST_CALLS_TO_A_REFUSAL = 8;

const cases = [];

function test(name, body) {
  cases.push({ name, body });
}

/** Runs every case in order. A failed one does not stop the next. */
async function run() {
  // Node ends with 0 when nothing is left that could settle a promise. That must not pass for a finished run.
  process.exitCode = 1;
  for (const { name, body } of cases) {
    try {
      await body();
      console.log(`ok ${name}`);
    } catch (error) {
      console.log(`FAILED ${name}: ${`${error.name}: ${error.message}`.replace(/\s+/g, ' ')}`);
    }
  }
  process.exitCode = 0;
}

/** The error that the promise is rejected with, which must be of this kind. */
async function rejection(kind, promise) {
  let answer;
  try {
    answer = await promise;
  } catch (error) {
    assert.ok(error instanceof kind, `expected ${kind.name}, got ${error.name}: ${error.message}`);
    return error;
  }
  assert.fail(`expected ${kind.name}, got the answer ${JSON.stringify(answer)}`);
}

/** A model whose stream waits for `release` between its pieces. */
function newStream(script = 'one-by-one') {
  return `${script}/${randomUUID()}`;
}

/** Lets the upstream send this stream's next piece. */
async function release(model) {
  const answer = await fetch(`${suite.upstream}/control/release/${model.split('/')[1]}`, { method: 'POST' });
  await answer.arrayBuffer();
}

/** The headers of each request for this model that reached the upstream, names in lower case. */
async function received(model) {
  const answer = await fetch(`${suite.upstream}/control/received?${new URLSearchParams({ model })}`);
  const lowerCase = (headers) => Object.entries(headers).map(([name, value]) => [name.toLowerCase(), value]);
  return (await answer.json()).map((headers) => Object.fromEntries(lowerCase(headers)));
}

/** Reads a stream that breaks off: what came before must arrive, and then an error. A clean end would pass for a whole answer. */
async function expectCut(script, piecesOf) {
  const model = newStream(script);
  const pieces = [];
  try {
    for await (const piece of piecesOf(model)) {
      pieces.push(piece);
      await release(model);
    }
  } catch {
    assert.deepEqual(pieces, suite.pieces.slice(0, suite.pieces_before_cut));
    return;
  }
  assert.fail(`the cut stream ended as if it were whole, after ${JSON.stringify(pieces)}`);
}

/**
 * Calls until the tiny tier refuses one: the SDK must wait by itself, as long as `Retry-After` says, and then succeed.
 * Its own back-off would not do: two retries of at most 0.5 s and 1 s are over before the window of 2 s has moved on.
 */
async function expectSdkToWait(call) {
  for (let number = 0; number < MOST_CALLS_TO_A_REFUSAL; number += 1) {
    const model = `patient-${randomUUID()}`;
    assert.equal(await call(model), suite.text);
    const arrived = await received(model);
    assert.equal(arrived.length, 1);
    if (Number(arrived[0]['x-stainless-retry-count']) > 0) {
      assert.ok(number >= 2, `call ${number + 1} was refused although two are allowed`);
      return;
    }
  }
  assert.fail(`${MOST_CALLS_TO_A_REFUSAL} calls in a row, and none was refused`);
}

module.exports = { suite, test, run, rejection, newStream, release, received, expectCut, expectSdkToWait };
