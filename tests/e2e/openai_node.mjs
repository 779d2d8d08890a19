// OpenAI's own Node client, used as an application does: `node openai_node.mjs BASE_URL`. Writes one line of JSON, a
// result for each case; then it waits for the end of its input, so that what it has dropped is not dropped by its exit.

import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'any', maxRetries: 0 });
const messages = [{ role: 'user', content: 'What is the capital of France? Answer in one word.' }];
const schema = {
  type: 'object',
  properties: { city: { type: 'string', maxLength: 12 } },
  required: ['city'],
  additionalProperties: false,
};
const model = (await client.models.list()).data[0].id;
const chat = { model, messages, temperature: 0, max_tokens: 16 };

const read = async (stream, textOf) => {
  let text = '';
  let usage = null;
  for await (const chunk of stream) {
    if (chunk.choices.length > 0) text += textOf(chunk.choices[0]) ?? '';
    usage = chunk.usage ?? usage;
  }
  return { text, usage };
};

const errorOf = async (call) => {
  try {
    await call;
  } catch (error) {
    const { status, code, param, type } = error;
    return { class: error.constructor.name, status, code, param, type };
  }
  return null;
};

const cases = {
  models: async () => (await client.models.retrieve(model)).id,
  chat: async () => (await client.chat.completions.create(chat)).choices[0].message.content,
  chat_stream: async () => {
    const options = { ...chat, stream: true, stream_options: { include_usage: true } };
    return read(await client.chat.completions.create(options), ({ delta }) => delta.content);
  },
  named_tool: async () => {
    const answer = await client.chat.completions.create({
      ...chat,
      max_tokens: 100,
      tools: [{ type: 'function', function: { name: 'get_weather', parameters: schema } }],
      tool_choice: { type: 'function', function: { name: 'get_weather' } },
    });
    return answer.choices[0].message.tool_calls.map(({ function: called }) => called);
  },
  json_schema: async () => {
    const response_format = { type: 'json_schema', json_schema: { name: 'city', schema, strict: true } };
    const answer = await client.chat.completions.create({ ...chat, max_tokens: 60, response_format });
    return JSON.parse(answer.choices[0].message.content);
  },
  completion: async () => {
    const answer = await client.completions.create({
      model,
      prompt: 'The capital of France is',
      max_tokens: 8,
      temperature: 0,
    });
    return { text: answer.choices[0].text, usage: answer.usage };
  },
  embeddings: async () => {
    const answer = await client.embeddings.create({ model, input: ['one text', 'another'] });
    return answer.data.map(({ embedding }) => embedding);
  },
  bad_request: () => errorOf(client.chat.completions.create({ ...chat, top_p: 7 })),
  not_found: () => errorOf(client.chat.completions.create({ ...chat, model: 'other' })),
  abort: async () => {
    const options = { model, prompt: 'Once', max_tokens: 4000, stream: true, ignore_eos: true };
    const stream = await client.completions.create(options);
    for await (const chunk of stream) {
      stream.controller.abort();
      return chunk.object;
    }
  },
};

const results = {};
for (const [name, run] of Object.entries(cases)) results[name] = await run();
console.log(JSON.stringify(results));
for await (const _ of process.stdin);
