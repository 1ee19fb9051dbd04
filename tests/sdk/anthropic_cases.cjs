'use strict';
// The `@anthropic-ai/sdk` package from npm against Tollgate.

const assert = require('node:assert/strict');
const { Anthropic } = require('@anthropic-ai/sdk');
const { suite, test, run, rejection, newStream, release, received, expectCut, expectSdkToWait } = require('./case.cjs');

const question = { max_tokens: 100, messages: [{ role: 'user', content: 'Grüße?' }] };

function client(apiKey, options = {}) {
  return new Anthropic({ apiKey, baseURL: suite.url, timeout: 30_000, ...options });
}

async function message(anthropic, model = 'plain') {
  return (await anthropic.messages.create({ model, ...question })).content[0].text;
}

test('plain message', async () => {
  const create = client(suite.keys.roomy).messages.create({ model: 'plain', ...question });
  const { data, response } = await create.withResponse();
  assert.equal(data.content[0].text, suite.text);
  assert.equal(data.usage.output_tokens, suite.usage.output);
  assert.equal(response.headers.get('x-ratelimit-limit'), '1000');
  assert.match(response.headers.get('x-ratelimit-remaining'), /^\d{1,3}$/);
});

test('streamed message, one by one', async () => {
  const model = newStream();
  const pieces = [];
  const types = [];
  for await (const event of await client(suite.keys.roomy).messages.create({ model, stream: true, ...question })) {
    types.push(event.type);
    if (event.type === 'content_block_delta') {
      pieces.push(event.delta.text);
      await release(model);
    }
  }
  assert.deepEqual(pieces, suite.pieces);
  assert.deepEqual([types.at(0), types.at(-1)], ['message_start', 'message_stop']);
});

test('wrong key raises AuthenticationError', async () => {
  const wrong = message(client(suite.keys.wrong), 'wrong-key-anthropic-node');
  const error = await rejection(Anthropic.AuthenticationError, wrong);
  assert.match(error.message, /key/i);
  assert.equal(error.error.error.type, 'authentication_error');
  assert.deepEqual(await received('wrong-key-anthropic-node'), []);
});

test('over the limit raises RateLimitError', async () => {
  assert.equal(await message(client(suite.keys.hourly)), suite.text);
  const error = await rejection(Anthropic.RateLimitError, message(client(suite.keys.hourly, { maxRetries: 0 })));
  assert.match(error.error.error.message, /limit/i);
  assert.equal(error.error.error.type, 'rate_limit_error');
  const seconds = Number(error.headers.get('retry-after'));
  assert.ok(seconds > 3500 && seconds <= 3600, `Retry-After: ${seconds}`);
});

test('a refusal for an hour is not retried', async () => {
  let calls = 0;
  const counted = (...call) => {
    calls += 1;
    return fetch(...call);
  };
  const error = await rejection(Anthropic.RateLimitError, message(client(suite.keys.hourly, { fetch: counted })));
  assert.equal(error.headers.get('x-should-retry'), 'false');
  assert.equal(calls, 1);
});

test('refused first, waits for Retry-After, succeeds', async () => {
  const patient = client(suite.keys.tiny);
  await expectSdkToWait((model) => message(patient, model));
});

async function* piecesOf(model) {
  for await (const event of await client(suite.keys.roomy).messages.create({ model, stream: true, ...question })) {
    if (event.type === 'content_block_delta') yield event.delta.text;
  }
}

test('stream cut inside an event raises', () => expectCut('cut-inside-event', piecesOf));

test('stream cut between events raises', () => expectCut('cut-between-events', piecesOf));

run();
