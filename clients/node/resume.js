// A stream that goes on after its connection or its engine was lost: what has arrived is sent along, and so is the seed.

import { setTimeout as sleep } from 'node:timers/promises';
import { CallError } from './errors.js';

const FIRST_DELAY_MS = 200;
const MAX_DELAY_MS = 5_000;

const mayGoOn = ({ code, reason }) =>
  code === 'UNAVAILABLE' ||
  (code === 'RESOURCE_EXHAUSTED' && reason === 'SLOW_CLIENT') ||
  // The server has not noticed yet that the stream before is gone.
  (code === 'ALREADY_EXISTS' && reason === 'DUPLICATE_REQUEST');

/** The request that continues an answer after these tokens. */
const continuation = (request, accepted, tokenIds) => ({
  ...request,
  request_id: accepted.request_id,
  sampling: { ...request.sampling, seed: accepted.seed },
  resume_output_token_ids: { ids: [...tokenIds] },
});

/**
 * Messages of `open(request, options)` as if it had never failed: one Accepted, one sequence of indices, no text twice.
 * An answer of several choices can not be continued: the tokens to send along are those of one.
 */
export async function* resumed(open, request, options, maxResumes) {
  if ((request.sampling?.n ?? 1) > 1) throw new TypeError('a stream of several choices can not be resumed');
  const deadline = options.timeoutMs === undefined ? undefined : Date.now() + options.timeoutMs;
  const tokenIds = [...(request.resume_output_token_ids?.ids ?? [])];
  const first = { ...request, output: { ...request.output, token_ids: true } };
  let accepted;
  let numMessages = 0;
  for (let numResumes = 0; ; numResumes += 1) {
    const next = accepted ? continuation(first, accepted, tokenIds) : first;
    const left = deadline === undefined ? undefined : deadline - Date.now();
    try {
      for await (const message of open(next, { ...options, timeoutMs: left })) {
        if (message.accepted && accepted) continue;
        accepted ??= message.accepted;
        tokenIds.push(...(message.delta?.token_ids ?? []));
        yield { ...message, index: String(numMessages) };
        numMessages += 1;
      }
      return;
    } catch (error) {
      if (!(error instanceof CallError) || !mayGoOn(error) || !accepted || numResumes === maxResumes) throw error;
      await pause(error, numResumes, deadline, options.signal);
    }
  }
}

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
