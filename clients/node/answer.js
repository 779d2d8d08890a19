// One answer over several calls: what to ask for after a break, and what of the next call is new.
//
// The tokens so far are sent along, with the seed of Accepted, and the server goes on behind them as if nothing had
// happened. All but those of the last delta: whether the answer had ended with them is what the break may have hidden.
// They are generated again, compared, and not given twice.

/** A server has generated other tokens than those that were given. */
export class Diverged extends Error {}

const emptyStretch = () => ({ tokenIds: [], numChars: {}, numReasoning: 0 });

/** Cut what was given before off a text, and what was cut off the counts. */
const withoutKnown = (text, name, numKnown) => {
  // A character outside the first plane is two units, which a delta never parts.
  const count = Math.min(numKnown[name] ?? 0, text?.length ?? 0);
  if (count > 0) numKnown[name] -= count;
  return text?.slice(count);
};

const isEmpty = ({ token_ids, logprobs, tool_calls, text, content, reasoning }) =>
  !(token_ids?.length || logprobs?.length || tool_calls?.length || text || content || reasoning);

export class Answer {
  #request;
  #showsTokenIds;
  #accepted;
  #numGiven = 0;
  // Tokens before the last stretch: what the next call starts behind.
  #kept;
  #numBefore;
  #numKeptReasoning = 0;
  #resumed = { numTokens: 0, numReasoning: 0 };
  // What was given since then, and what of it this call has yet to repeat.
  #last = emptyStretch();
  #expected = emptyStretch();
  #knownCalls = new Set();

  constructor(request) {
    if ((request.sampling?.n ?? 1) > 1) throw new TypeError('a stream of several choices can not be resumed');
    if (request.output?.echo_prompt) throw new TypeError('a stream that echoes its prompt can not be resumed');
    this.#showsTokenIds = Boolean(request.output?.token_ids);
    this.#request = { ...request, output: { ...request.output, token_ids: true } };
    this.#kept = [...(request.resume_output_token_ids?.ids ?? [])];
    this.#numBefore = this.#kept.length;
  }

  get hasBegun() {
    return this.#accepted !== undefined;
  }

  /** Output tokens that the caller has. */
  get numTokens() {
    return this.#kept.length - this.#numBefore + this.#last.tokenIds.length;
  }

  /** The request of the next call. */
  next() {
    this.#resumed = { numTokens: this.#kept.length - this.#numBefore, numReasoning: this.#numKeptReasoning };
    this.#expected = structuredClone(this.#last);
    if (!this.#accepted) return this.#request;
    const { request_id, seed } = this.#accepted;
    const sampling = { ...this.#request.sampling, seed };
    return { ...this.#request, request_id, sampling, resume_output_token_ids: { ids: [...this.#kept] } };
  }

  /** What of a message is new to the caller, or nothing. Throws Diverged. */
  take(message) {
    const event = this.#newEvent(message);
    if (!event) return undefined;
    const index = String(this.#numGiven);
    this.#numGiven += 1;
    return { ...message, ...event, index };
  }

  #newEvent({ accepted, prompt, delta, finished }) {
    if (accepted) return this.#takeAccepted(accepted);
    if (prompt) {
      // It would come again with the next call.
      delete this.#request.output.prompt_logprobs;
      return { prompt };
    }
    return delta ? this.#takeDelta(delta) : { finished: this.#takeFinished(finished) };
  }

  #takeAccepted(accepted) {
    const first = this.#accepted;
    this.#accepted ??= accepted;
    // Another model stands there now, and its text would be no continuation.
    if (first && first.model !== accepted.model) throw new Diverged();
    return first ? undefined : { accepted };
  }

  #takeDelta(delta) {
    const rest = this.#withoutExpected(delta);
    if (rest.token_ids.length > 0) {
      this.#closeStretch();
      this.#last.tokenIds = [...rest.token_ids];
      this.#last.numReasoning = rest.reasoning ? rest.token_ids.length : 0;
    }
    this.#count(rest);
    if (!this.#showsTokenIds) rest.token_ids = [];
    return isEmpty(rest) ? undefined : { delta: rest };
  }

  #withoutExpected(delta) {
    const { tokenIds, numChars } = this.#expected;
    const known = tokenIds.splice(0, delta.token_ids.length);
    if (known.some((tokenId, place) => delta.token_ids[place] !== tokenId)) this.#diverge();
    const rest = {
      ...delta,
      token_ids: delta.token_ids.slice(known.length),
      logprobs: delta.logprobs?.slice(known.length),
    };
    for (const name of ['text', 'content', 'reasoning']) {
      if (name in rest) rest[name] = withoutKnown(rest[name], name, numChars);
    }
    rest.tool_calls = delta.tool_calls && this.#newCalls(delta.tool_calls, numChars);
    return rest;
  }

  /** The beginning of a call is left out when it is known: repeated, it would have another id. */
  #newCalls(calls, numChars) {
    return calls
      .map((call) => ({
        ...call,
        ...(this.#knownCalls.has(call.index) && { id: '', name: '' }),
        arguments: withoutKnown(call.arguments, `arguments ${call.index}`, numChars),
      }))
      .filter((call) => call.id || call.name || call.arguments);
  }

  #count(delta) {
    const add = (name, text) => {
      if (text) this.#last.numChars[name] = (this.#last.numChars[name] ?? 0) + text.length;
    };
    for (const name of ['text', 'content', 'reasoning']) add(name, delta[name]);
    for (const call of delta.tool_calls ?? []) {
      add(`arguments ${call.index}`, call.arguments);
      this.#knownCalls.add(call.index);
    }
  }

  #takeFinished(finished) {
    // It ends before that which was given does.
    if (this.#expected.tokenIds.length > 0) this.#diverge();
    const { usage } = finished;
    if (!usage) return finished;
    // The server leaves out what it did not generate in this call.
    return {
      ...finished,
      usage: {
        ...usage,
        completion_tokens: usage.completion_tokens + this.#resumed.numTokens,
        reasoning_tokens: usage.reasoning_tokens + this.#resumed.numReasoning,
      },
    };
  }

  #closeStretch() {
    this.#kept.push(...this.#last.tokenIds);
    this.#numKeptReasoning += this.#last.numReasoning;
    this.#last = emptyStretch();
  }

  /** From now on hold on to all that was given. */
  #diverge() {
    this.#closeStretch();
    throw new Diverged();
  }
}
