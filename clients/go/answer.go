package stepwire

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	v1 "stepwire/v1"
)

// answer is one answer over several streams: what to ask for after a break, and what of the next stream is new.
//
// The tokens so far are sent along, with the seed of Accepted, and the server goes on behind them as if nothing had
// happened. All but those of the last delta: whether the answer had ended with them is what the break may have hidden.
// They are generated again, compared, and not given twice.
type answer struct {
	request       requestFields
	showsTokenIDs bool
	accepted      acceptedMessage
	numGiven      uint64
	// Tokens before the last stretch, which the next stream starts behind; numBefore of them are the caller's own.
	kept             []uint32
	numBefore        int
	numKeptReasoning uint32
	// The same at the beginning of this stream, without the caller's own.
	numResumed, numResumedReasoning uint32
	// What was given since then, and what of it this stream has yet to repeat.
	last, expected stretch
	knownCalls     map[uint32]bool
}

// stretch is output that was given since the tokens that the next stream starts behind.
type stretch struct {
	tokenIDs     []uint32
	numReasoning uint32
	// Of each text, by its name.
	numBytes map[string]int
}

// diverged is the error of a server that generates other tokens than those that were given.
var diverged = &Error{Code: codes.Unavailable, Message: "the resumed answer has become another one"}

func newAnswer(request requestFields) *answer {
	request.fill()
	shows := (*request.output).TokenIds
	(*request.output).TokenIds = true
	kept := append([]uint32{}, (*request.resumed).Ids...)
	return &answer{
		request: request, showsTokenIDs: shows, kept: kept, numBefore: len(kept), knownCalls: map[uint32]bool{},
	}
}

// prepare makes the request the one of the next stream.
func (a *answer) prepare() {
	a.numResumed, a.numResumedReasoning = uint32(len(a.kept)-a.numBefore), a.numKeptReasoning
	a.expected = a.last.copy()
	(*a.request.resumed).Ids = append([]uint32{}, a.kept...)
	if a.accepted != nil {
		*a.request.id = a.accepted.GetRequestId()
		(*a.request.sampling).Seed = proto.Int64(a.accepted.GetSeed())
	}
}

// take reduces an event to what is new in it, and reports whether anything is.
func (a *answer) take(event event) (bool, error) {
	isNew, err := true, error(nil)
	switch {
	case event.accepted != nil:
		isNew, err = a.takeAccepted(event.accepted)
	case event.isPrompt:
		// It would come again with the next stream.
		(*a.request.output).PromptLogprobs = nil
	case event.delta != nil:
		isNew, err = a.takeDelta(*event.delta)
	case event.isFinished:
		err = a.takeFinished(event.usage)
	}
	if isNew && err == nil {
		*event.index = a.numGiven
		a.numGiven++
	}
	return isNew, err
}

// numTokens is how many output tokens the caller has.
func (a *answer) numTokens() int { return len(a.kept) - a.numBefore + len(a.last.tokenIDs) }

func (a *answer) takeAccepted(accepted acceptedMessage) (bool, error) {
	if a.accepted == nil {
		a.accepted = accepted
		return true, nil
	}
	if a.accepted.GetModel() != accepted.GetModel() {
		// Another model stands there now, and its text would be no continuation.
		return false, diverged
	}
	return false, nil
}

func (a *answer) takeDelta(delta deltaFields) (bool, error) {
	if err := a.dropExpected(delta); err != nil {
		return false, err
	}
	if len(*delta.tokenIDs) > 0 {
		a.closeStretch()
		a.last.tokenIDs = append([]uint32{}, *delta.tokenIDs...)
		if delta.hasReasoning() {
			a.last.numReasoning = uint32(len(*delta.tokenIDs))
		}
	}
	a.count(delta)
	if !a.showsTokenIDs {
		*delta.tokenIDs = nil
	}
	return !delta.isEmpty(), nil
}

// dropExpected leaves what is new in a delta.
func (a *answer) dropExpected(delta deltaFields) error {
	num := len(a.expected.tokenIDs)
	if num > len(*delta.tokenIDs) {
		num = len(*delta.tokenIDs)
	}
	for place, id := range a.expected.tokenIDs[:num] {
		if (*delta.tokenIDs)[place] != id {
			return a.diverge()
		}
	}
	a.expected.tokenIDs, *delta.tokenIDs = a.expected.tokenIDs[num:], (*delta.tokenIDs)[num:]
	if num <= len(*delta.logprobs) {
		*delta.logprobs = (*delta.logprobs)[num:]
	}
	for _, text := range delta.texts() {
		known := a.expected.numBytes[text.name]
		if known > len(*text.value) {
			known = len(*text.value)
		}
		if known > 0 {
			*text.value = (*text.value)[known:]
			a.expected.numBytes[text.name] -= known
		}
	}
	a.dropKnownCalls(delta)
	return nil
}

// dropKnownCalls leaves out the beginnings of calls that have begun: repeated, they would have other ids.
func (a *answer) dropKnownCalls(delta deltaFields) {
	if delta.calls == nil {
		return
	}
	var rest []*v1.ToolCall
	for _, call := range *delta.calls {
		if a.knownCalls[call.Index] {
			call.Id, call.Name = "", ""
		}
		if call.Id != "" || call.Name != "" || call.Arguments != "" {
			rest = append(rest, call)
		}
	}
	*delta.calls = rest
}

func (a *answer) count(delta deltaFields) {
	if a.last.numBytes == nil {
		a.last.numBytes = map[string]int{}
	}
	for _, text := range delta.texts() {
		a.last.numBytes[text.name] += len(*text.value)
	}
	if delta.calls != nil {
		for _, call := range *delta.calls {
			a.knownCalls[call.Index] = true
		}
	}
}

func (a *answer) takeFinished(usage *v1.Usage) error {
	if len(a.expected.tokenIDs) > 0 {
		// It ends before that which was given does.
		return a.diverge()
	}
	if usage != nil {
		// The server leaves out what it did not generate in this stream.
		usage.CompletionTokens += a.numResumed
		usage.ReasoningTokens += a.numResumedReasoning
	}
	return nil
}

func (a *answer) closeStretch() {
	a.kept = append(a.kept, a.last.tokenIDs...)
	a.numKeptReasoning += a.last.numReasoning
	a.last = stretch{}
}

// diverge makes the next stream hold on to all that was given.
func (a *answer) diverge() error {
	a.closeStretch()
	return diverged
}

func (s stretch) copy() stretch {
	numBytes := map[string]int{}
	for name, num := range s.numBytes {
		numBytes[name] = num
	}
	return stretch{append([]uint32{}, s.tokenIDs...), s.numReasoning, numBytes}
}
