package stepwire

import (
	"strconv"

	"google.golang.org/protobuf/proto"

	v1 "stepwire/v1"
)

// receiver is a stream of messages.
type receiver[Message proto.Message] interface{ Recv() (Message, error) }

// acceptedMessage is the Accepted of either RPC.
type acceptedMessage interface {
	GetRequestId() string
	GetModel() string
	GetSeed() int64
}

// event is what a resumption reads and changes in a message of either RPC. One of the others is set beside the index.
type event struct {
	index      *uint64
	accepted   acceptedMessage
	isPrompt   bool
	delta      *deltaFields
	isFinished bool
	// Of a finished answer; may be nil.
	usage *v1.Usage
}

func readGeneration(message *v1.GenerateStreamResponse) event {
	read := event{index: &message.Index, isPrompt: message.GetPrompt() != nil}
	if accepted := message.GetAccepted(); accepted != nil {
		read.accepted = accepted
	}
	if delta := message.GetDelta(); delta != nil {
		read.delta = &deltaFields{tokenIDs: &delta.TokenIds, logprobs: &delta.Logprobs, text: &delta.Text}
	}
	read.isFinished, read.usage = message.GetFinished() != nil, message.GetFinished().GetUsage()
	return read
}

func readChat(message *v1.ChatStreamResponse) event {
	read := event{index: &message.Index}
	if accepted := message.GetAccepted(); accepted != nil {
		read.accepted = accepted
	}
	if delta := message.GetDelta(); delta != nil {
		read.delta = &deltaFields{
			tokenIDs: &delta.TokenIds, logprobs: &delta.Logprobs,
			text: &delta.Content, reasoning: &delta.Reasoning, calls: &delta.ToolCalls,
		}
	}
	read.isFinished, read.usage = message.GetFinished() != nil, message.GetFinished().GetUsage()
	return read
}

// deltaFields are those of a delta; the last two are nil in a generation.
type deltaFields struct {
	tokenIDs  *[]uint32
	logprobs  *[]*v1.TokenLogprobs
	text      *string
	reasoning *string
	calls     *[]*v1.ToolCall
}

// namedText is a text that grows delta by delta, by a name that is the same in each.
type namedText struct {
	name  string
	value *string
}

func (d deltaFields) texts() []namedText {
	texts := []namedText{{"text", d.text}}
	if d.reasoning != nil {
		texts = append(texts, namedText{"reasoning", d.reasoning})
	}
	if d.calls != nil {
		for _, call := range *d.calls {
			name := "arguments " + strconv.FormatUint(uint64(call.Index), 10)
			texts = append(texts, namedText{name, &call.Arguments})
		}
	}
	return texts
}

func (d deltaFields) hasReasoning() bool { return d.reasoning != nil && *d.reasoning != "" }

// isEmpty reports that nothing is left that a caller could want.
func (d deltaFields) isEmpty() bool {
	for _, text := range d.texts() {
		if *text.value != "" {
			return false
		}
	}
	hasCalls := d.calls != nil && len(*d.calls) > 0
	return len(*d.tokenIDs) == 0 && len(*d.logprobs) == 0 && !hasCalls
}

// requestFields are those of a request of either RPC that a resumption reads and changes.
type requestFields struct {
	id       *string
	sampling **v1.SamplingParams
	output   **v1.OutputOptions
	resumed  **v1.TokenIds
}

// fill makes the messages that will be written to.
func (f requestFields) fill() {
	if *f.sampling == nil {
		*f.sampling = &v1.SamplingParams{}
	}
	if *f.output == nil {
		*f.output = &v1.OutputOptions{}
	}
	if *f.resumed == nil {
		*f.resumed = &v1.TokenIds{}
	}
}

// canBeResumed is false where the server would refuse, or echo the prompt into the middle of the answer.
func (f requestFields) canBeResumed() bool {
	return (*f.sampling).GetN() <= 1 && !(*f.output).GetEchoPrompt()
}
