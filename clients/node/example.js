// Streams an answer to the terminal: `node example.js "The capital of France is" [TARGET]`.

import { CallError, connect } from './index.js';

const [prompt = 'The capital of France is', target] = process.argv.slice(2);
const client = connect(target);
try {
  const request = { text: prompt, sampling: { temperature: 0 }, stop: { max_tokens: 32 } };
  for await (const { delta, finished } of client.generateStream(request, { maxResumes: 2 })) {
    if (delta) process.stdout.write(delta.text);
    if (finished) console.log(`\n${finished.reason}, ${finished.usage.completion_tokens} tokens`);
  }
} catch (error) {
  if (!(error instanceof CallError)) throw error;
  console.error(error.message);
  process.exitCode = 1;
} finally {
  client.close();
}
