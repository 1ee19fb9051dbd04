'use strict';
// The `openai` package from npm against Tollgate.

const assert = require('node:assert/strict');
const { OpenAI } = require('openai');
const { suite, test, run, rejection, newStream, release, received, expectCut, expectSdkToWait } = require('./case.cjs');

const messages = [{ role: 'user', content: 'Grüße?' }];

function client(apiKey, options = {}) {
  return new OpenAI({ apiKey, baseURL: `${suite.url}/v1`, timeout: 30_000, ...options });
}

async function chat(openai, model = 'plain') {
  const answer = await openai.chat.completions.create({ model, messages });
  return answer.choices[0].message.content;
}

test('plain chat completion', async () => {
  const create = client(suite.keys.roomy).chat.completions.create({ model: 'plain', messages });
  const { data, response } = await create.withResponse();
  assert.equal(data.choices[0].message.content, suite.text);
  assert.equal(data.usage.total_tokens, suite.usage.input + suite.usage.output);
  assert.equal(response.headers.get('x-ratelimit-limit'), '1000');
  assert.match(response.headers.get('x-ratelimit-remaining'), /^\d{1,3}$/);
});

test('plain response', async () => {
  const answer = await client(suite.keys.roomy).responses.create({ model: 'plain', input: 'Grüße?' });
  assert.equal(answer.output_text, suite.text);
  assert.equal(answer.usage.output_tokens, suite.usage.output);
});

test('streamed chat completion, one by one', async () => {
  const model = newStream();
  const pieces = [];
  let usage;
  const options = { model, messages, stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client(suite.keys.roomy).chat.completions.create(options)) {
    usage = chunk.usage ?? usage;
    const piece = chunk.choices[0]?.delta.content;
    if (piece) {
      pieces.push(piece);
      await release(model);
    }
  }
  assert.deepEqual(pieces, suite.pieces);
  assert.equal(usage.completion_tokens, suite.usage.output);
});

test('streamed response, one by one', async () => {
  const model = newStream();
  const pieces = [];
  const types = [];
  for await (const event of await client(suite.keys.roomy).responses.create({ model, input: 'Grüße?', stream: true })) {
    types.push(event.type);
    if (event.type === 'response.output_text.delta') {
      pieces.push(event.delta);
      await release(model);
    }
  }
  assert.deepEqual(pieces, suite.pieces);
  assert.deepEqual([types.at(0), types.at(-1)], ['response.created', 'response.completed']);
});

test('wrong key raises AuthenticationError', async () => {
  const error = await rejection(OpenAI.AuthenticationError, chat(client(suite.keys.wrong), 'wrong-key-openai-node'));
  assert.match(error.message, /key/i);
  assert.deepEqual([error.type, error.code], ['authentication_error', 'invalid_api_key']);
  assert.deepEqual(await received('wrong-key-openai-node'), []);
});

test('over the limit raises RateLimitError', async () => {
  assert.equal(await chat(client(suite.keys.hourly)), suite.text);
  const error = await rejection(OpenAI.RateLimitError, chat(client(suite.keys.hourly, { maxRetries: 0 })));
  assert.match(error.message, /limit/i);
  assert.equal(error.code, 'rate_limit_exceeded');
  const seconds = Number(error.headers.get('retry-after'));
  assert.ok(seconds > 3500 && seconds <= 3600, `Retry-After: ${seconds}`);
});

test('a refusal for an hour is not retried', async () => {
  let calls = 0;
  const counted = (...call) => {
    calls += 1;
    return fetch(...call);
  };
  const error = await rejection(OpenAI.RateLimitError, chat(client(suite.keys.hourly, { fetch: counted })));
  assert.equal(error.headers.get('x-should-retry'), 'false');
  assert.equal(calls, 1);
});

test('refused first, waits for Retry-After, succeeds', async () => {
  const patient = client(suite.keys.tiny);
  await expectSdkToWait((model) => chat(patient, model));
});

async function* chatPieces(model) {
  for await (const chunk of await client(suite.keys.roomy).chat.completions.create({ model, messages, stream: true })) {
    const piece = chunk.choices[0]?.delta.content;
    if (piece) yield piece;
  }
}

async function* responsePieces(model) {
  for await (const event of await client(suite.keys.roomy).responses.create({ model, input: 'Grüße?', stream: true })) {
    if (event.type === 'response.output_text.delta') yield event.delta;
  }
}

test('stream cut inside an event raises', () => expectCut('cut-inside-event', chatPieces));

test('stream cut between events raises', () => expectCut('cut-between-events', chatPieces));

test('streamed response that is cut raises', () => expectCut('cut-between-events', responsePieces));

run();
