package stepwire

import (
	"google.golang.org/protobuf/proto"

	v1 "stepwire/v1"
)

// receiver is a stream of messages.
type receiver[Message proto.Message] interface{ Recv() (Message, error) }

// event is what a resumption reads in a message, whichever RPC it belongs to.
type event struct {
	index *uint64
	// nil but in Accepted.
	accepted interface {
		GetRequestId() string
		GetSeed() int64
	}
	tokenIDs []uint32
	isPrompt bool
}

func readGeneration(message *v1.GenerateStreamResponse) event {
	read := event{
		index: &message.Index, tokenIDs: message.GetDelta().GetTokenIds(), isPrompt: message.GetPrompt() != nil,
	}
	if accepted := message.GetAccepted(); accepted != nil {
		read.accepted = accepted
	}
	return read
}

func readChat(message *v1.ChatStreamResponse) event {
	read := event{index: &message.Index, tokenIDs: message.GetDelta().GetTokenIds()}
	if accepted := message.GetAccepted(); accepted != nil {
		read.accepted = accepted
	}
	return read
}

// requestFields are those of a request that a resumption reads and changes, whichever RPC it belongs to.
type requestFields struct {
	id       *string
	sampling **v1.SamplingParams
	output   **v1.OutputOptions
	resumed  **v1.TokenIds
	stop     *v1.StopConditions
}

// fill makes the messages that will be written to, and asks for the ids of output tokens.
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
	(*f.output).TokenIds = true
}

// canBeResumed is false where the server would refuse, which says less than the failure that came before.
func (f requestFields) canBeResumed() bool {
	isFull := f.stop != nil && f.stop.MaxTokens != nil && len((*f.resumed).Ids) >= int(*f.stop.MaxTokens)
	return (*f.sampling).GetN() <= 1 && !isFull
}
