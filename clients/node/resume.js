// A stream that goes on after its connection or its engine was lost; what is asked for and given is known to Answer.

import { setTimeout as sleep } from 'node:timers/promises';
import { Answer, Diverged } from './answer.js';
import { CallError } from './errors.js';

const FIRST_DELAY_MS = 200;
const MAX_DELAY_MS = 5_000;

const mayGoOn = ({ code, reason }) =>
  code === 'UNAVAILABLE' ||
  (code === 'RESOURCE_EXHAUSTED' && reason === 'SLOW_CLIENT') ||
  // The server has not noticed yet that the stream before is gone.
  (code === 'ALREADY_EXISTS' && reason === 'DUPLICATE_REQUEST');

/** Messages of `open(request, options)` as if it had never failed: one Accepted, one sequence of indices. */
export async function* resumed(open, request, options, maxResumes) {
  const answer = new Answer(request);
  const deadline = options.timeoutMs === undefined ? undefined : Date.now() + options.timeoutMs;
  for (let numResumes = 0; ; numResumes += 1) {
    const left = deadline === undefined ? undefined : deadline - Date.now();
    try {
      for await (const message of open(answer.next(), { ...options, timeoutMs: left })) {
        const news = answer.take(message);
        if (news) yield news;
      }
      return;
    } catch (thrown) {
      const error = asCallError(thrown);
      if (numResumes > 0) error.metadata.tokens_emitted = String(answer.numTokens);
      if (!mayGoOn(error) || !answer.hasBegun || numResumes === maxResumes) throw error;
      await pause(error, numResumes, deadline, options.signal);
    }
  }
}

const asCallError = (thrown) => {
  if (thrown instanceof Diverged) return new CallError('UNAVAILABLE', 'the resumed answer has become another one');
  if (thrown instanceof CallError) return thrown;
  throw thrown;
};

/** As long as the server asks for, otherwise longer each time; an error when the deadline would pass meanwhile. */
const pause = async (error, numResumes, deadline, signal) => {
  const delay = error.retryDelayMs || Math.min(FIRST_DELAY_MS * 2 ** numResumes, MAX_DELAY_MS);
  if (deadline !== undefined && Date.now() + delay >= deadline) throw error;
  try {
    await sleep(delay, undefined, { signal });
  } catch {
    throw new CallError('CANCELLED', 'cancelled by the caller', { cause: error });
  }
};
