'use strict';
// Drives one npm SDK: `node clients.cjs ADAPTER [previous]`. It speaks as clients.py does.

const fs = require('node:fs');
const os = require('node:os');
const path = require('node:path');
const readline = require('node:readline');

const [adapterName, release] = process.argv.slice(2);
const question = 'Grüße?';
const timeout = 30_000;
// The AI SDK has a say about every model that it does not know.
globalThis.AI_SDK_LOG_WARNINGS = false;

const user = (content) => ({ role: 'user', content });

/** Where a package is installed: the previous major under a name of its own. */
function nameOf(name) {
  return release === 'previous' ? `previous-${name.replace('@', '').replace('/', '-')}` : name;
}

/** OpenAI's chat completions. A stream yields its pieces of text and, as a number, the output tokens. */
class OpenAiChat {
  static package = 'openai';

  constructor(url, apiKey, options) {
    const { OpenAI } = require(nameOf('openai'));
    this.client = new OpenAI({ apiKey, baseURL: url, timeout, ...options });
  }

  async plain(model, content) {
    const call = this.client.chat.completions.create({ model, messages: [user(content)] });
    const { data, response } = await call.withResponse();
    return [data.choices[0].message.content, data.usage.completion_tokens, Object.fromEntries(response.headers)];
  }

  async *stream(model) {
    const call = { model, messages: [user(question)], stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await this.client.chat.completions.create(call)) {
      yield chunk.choices[0]?.delta.content;
      yield chunk.usage?.completion_tokens;
    }
  }

  /** A file that is read as it is sent has no length for the SDK: the body is chunked. */
  async upload(model, size) {
    const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'tollgate-sdk-'));
    try {
      const file = path.join(folder, 'batch.jsonl');
      fs.writeFileSync(file, 'x'.repeat(size));
      await this.client.files.create({ file: fs.createReadStream(file), purpose: 'batch' });
    } finally {
      fs.rmSync(folder, { recursive: true });
    }
  }
}

class OpenAiResponses extends OpenAiChat {
  async plain(model, input) {
    const { data, response } = await this.client.responses.create({ model, input }).withResponse();
    return [data.output_text, data.usage.output_tokens, Object.fromEntries(response.headers)];
  }

  async *stream(model) {
    for await (const event of await this.client.responses.create({ model, input: question, stream: true })) {
      if (event.type === 'response.output_text.delta') yield event.delta;
      if (event.type === 'response.completed') yield event.response.usage.output_tokens;
    }
  }
}

class Anthropic {
  static package = '@anthropic-ai/sdk';

  constructor(url, apiKey, options) {
    const sdk = require(nameOf('@anthropic-ai/sdk'));
    this.client = new sdk.Anthropic({ apiKey, baseURL: url, timeout, ...options });
  }

  async plain(model, content) {
    const call = this.client.messages.create({ model, max_tokens: 100, messages: [user(content)] });
    const { data, response } = await call.withResponse();
    return [data.content[0].text, data.usage.output_tokens, Object.fromEntries(response.headers)];
  }

  async *stream(model) {
    const options = { model, max_tokens: 100, messages: [user(question)], stream: true };
    for await (const event of await this.client.messages.create(options)) {
      if (event.type === 'content_block_delta') yield event.delta.text;
      if (event.type === 'message_delta') yield event.usage.output_tokens;
    }
  }
}

class GoogleGenAi {
  static package = '@google/genai';

  constructor(url, apiKey) {
    const { GoogleGenAI } = require(nameOf('@google/genai'));
    // It does not retry unless told to, so there is nothing to switch off.
    this.client = new GoogleGenAI({ apiKey, httpOptions: { baseUrl: url, timeout } });
  }

  async plain(model, contents) {
    const answer = await this.client.models.generateContent({ model, contents });
    return [answer.text, answer.usageMetadata.candidatesTokenCount, answer.sdkHttpResponse?.headers];
  }

  async *stream(model) {
    for await (const chunk of await this.client.models.generateContentStream({ model, contents: question })) {
      yield chunk.text;
      yield chunk.usageMetadata.candidatesTokenCount;
    }
  }
}

/** Vercel's AI SDK, with one provider. */
class Ai {
  static package = 'ai';

  constructor(url, apiKey, options) {
    this.sdk = require(nameOf('ai'));
    this.provider = this.constructor.provider(url, apiKey);
    this.options = options;
  }

  async plain(model, prompt) {
    const answer = await this.sdk.generateText({ model: this.provider(model), prompt, ...this.options });
    return [answer.text, answer.usage.outputTokens, answer.response.headers];
  }

  async *stream(model) {
    // Errors are parts of the stream, which `onError` would print.
    const call = { model: this.provider(model), prompt: question, onError() {}, ...this.options };
    for await (const part of this.sdk.streamText(call).fullStream) {
      if (part.type === 'error') throw part.error;
      if (part.type === 'text-delta') yield part.text;
      if (part.type === 'finish') yield part.totalUsage.outputTokens;
    }
  }
}

class AiOpenAi extends Ai {
  static provider(url, apiKey) {
    return require(nameOf('@ai-sdk/openai')).createOpenAI({ apiKey, baseURL: url });
  }
}

class AiAnthropic extends Ai {
  static provider(url, apiKey) {
    return require(nameOf('@ai-sdk/anthropic')).createAnthropic({ apiKey, baseURL: url });
  }
}

class AiGoogle extends Ai {
  static provider(url, apiKey) {
    return require(nameOf('@ai-sdk/google')).createGoogleGenerativeAI({ apiKey, baseURL: url });
  }
}

const adapters = {
  openai: OpenAiChat,
  'openai-responses': OpenAiResponses,
  anthropic: Anthropic,
  'google-genai': GoogleGenAi,
  'ai-openai': AiOpenAi,
  'ai-anthropic': AiAnthropic,
  'ai-google': AiGoogle,
};

async function main() {
  const adapter = adapters[adapterName];
  tell({ version: versionOf(nameOf(adapter.package)) });
  const clients = new Map();
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const call = JSON.parse(line);
    const id = JSON.stringify([call.url, call.key, call.retries]);
    const options = call.retries === null ? {} : { maxRetries: call.retries };
    if (!clients.has(id)) clients.set(id, new adapter(call.url, call.key, options));
    try {
      await make(call, clients.get(id));
    } catch (error) {
      tell(told(error));
    }
  }
}

function versionOf(name) {
  const file = path.join(process.env.NODE_PATH, name, 'package.json');
  return fs.existsSync(file) ? JSON.parse(fs.readFileSync(file)).version : null;
}

/** Makes one call, and tells how it went on. */
async function make(call, client) {
  if (call.do === 'plain') {
    const [text, tokens, headers] = await client.plain(call.model, 'x'.repeat(call.size) || question);
    tell({ text, tokens, headers: headers ?? null });
  } else if (call.do === 'upload') {
    await (client.upload ? client.upload(call.model, call.size) : client.plain(call.model, 'x'.repeat(call.size)));
    tell({ text: '', tokens: 0, headers: null });
  } else {
    let text = '';
    let tokens = null;
    for await (const part of client.stream(call.model)) {
      if (typeof part === 'number') {
        tokens = part;
      } else if (part) {
        text += part;
        tell({ piece: part });
      }
    }
    tell({ text, tokens, headers: null });
  }
}

/** An error as the SDK's user sees it. The AI SDK wraps the last of its tries. */
function told(error) {
  const last = error.lastError ?? error;
  const causes = [];
  for (let cause = last; cause; cause = cause.cause) causes.push(`${cause.code ?? ''} ${cause.message ?? cause};`);
  const { headers = last.responseHeaders } = last;
  return {
    raised: last.name && last.name !== 'Error' ? last.name : last.constructor.name,
    status: last.status ?? last.statusCode ?? null,
    details: [...causes, JSON.stringify(last.error), last.responseBody].join(' '),
    headers: headers instanceof Headers ? Object.fromEntries(headers) : (headers ?? null),
  };
}

function tell(event) {
  process.stdout.write(`${JSON.stringify(event)}\n`);
}

main();
