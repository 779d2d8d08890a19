package stepwire

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	v1 "stepwire/v1"
)

// The waits before a resumption where the server does not say how long: doubled each time, up to a limit.
const (
	firstBackoff = 200 * time.Millisecond
	maxBackoff   = 5 * time.Second
)

// ResumingStream is a generation that outlives broken streams. When its stream breaks after Accepted (the server went
// away, or gave up on a client that was too slow) it is opened again where it broke: with the tokens received so far
// and the seed of Accepted, so that the answer is the one of an unbroken stream, sampled or not, and no text comes
// twice. Deltas carry token ids whatever the request says. Only answers of one choice can be resumed. The context's
// deadline holds for all streams together; the usage counts what the last one generated.
type ResumingStream[Message proto.Message] struct {
	ctx        context.Context
	open       func() (receiver[Message], error)
	read       func(Message) event
	request    requestFields
	maxResumes int
	numResumes int
	stream     receiver[Message]
	isAccepted bool
	isPrompted bool
	numSent    uint64
}

// GenerateResuming streams like GenerateStream, over broken streams, of which it opens at most maxResumes again.
func (c *Client) GenerateResuming(
	ctx context.Context, request *v1.GenerateRequest, maxResumes int, options ...grpc.CallOption,
) (*ResumingStream[*v1.GenerateStreamResponse], error) {
	request = proto.Clone(request).(*v1.GenerateRequest)
	fields := requestFields{
		&request.RequestId, &request.Sampling, &request.Output, &request.ResumeOutputTokenIds, request.GetStop(),
	}
	open := func() (receiver[*v1.GenerateStreamResponse], error) {
		return c.GenerateStream(ctx, request, options...)
	}
	return resuming(ctx, open, readGeneration, fields, maxResumes)
}

// ChatResuming streams like ChatStream, over broken streams, of which it opens at most maxResumes again.
func (c *Client) ChatResuming(
	ctx context.Context, request *v1.ChatRequest, maxResumes int, options ...grpc.CallOption,
) (*ResumingStream[*v1.ChatStreamResponse], error) {
	request = proto.Clone(request).(*v1.ChatRequest)
	fields := requestFields{
		&request.RequestId, &request.Sampling, &request.Output, &request.ResumeOutputTokenIds, request.GetStop(),
	}
	open := func() (receiver[*v1.ChatStreamResponse], error) { return c.ChatStream(ctx, request, options...) }
	return resuming(ctx, open, readChat, fields, maxResumes)
}

func resuming[Message proto.Message](
	ctx context.Context, open func() (receiver[Message], error), read func(Message) event, request requestFields,
	maxResumes int,
) (*ResumingStream[Message], error) {
	request.fill()
	stream, err := open()
	if err != nil {
		return nil, err
	}
	return &ResumingStream[Message]{
		ctx: ctx, open: open, read: read, request: request, maxResumes: maxResumes, stream: stream,
	}, nil
}

// Recv gives the next message, or io.EOF after the last one. The index of the messages counts over all streams.
func (s *ResumingStream[Message]) Recv() (Message, error) {
	for {
		message, err := s.stream.Recv()
		if err != nil {
			if err = s.reopen(err); err != nil {
				return message, err
			}
			continue
		}
		event := s.read(message)
		if s.note(event) {
			*event.index = s.numSent
			s.numSent++
			return message, nil
		}
	}
}

// note keeps what a resumption needs of a message, and reports whether the caller has yet to see it.
func (s *ResumingStream[Message]) note(event event) bool {
	isNew := true
	if event.accepted != nil {
		isNew, s.isAccepted = !s.isAccepted, true
		*s.request.id = event.accepted.GetRequestId()
		(*s.request.sampling).Seed = proto.Int64(event.accepted.GetSeed())
	}
	if event.isPrompt {
		isNew, s.isPrompted = !s.isPrompted, true
	}
	resumed := *s.request.resumed
	resumed.Ids = append(resumed.Ids, event.tokenIDs...)
	return isNew
}

// reopen opens the stream again where that can help, else it returns the failure.
func (s *ResumingStream[Message]) reopen(failure error) error {
	for s.canResume(failure) {
		if err := s.wait(failure); err != nil {
			return asError(status.FromContextError(err).Err())
		}
		s.numResumes++
		stream, err := s.open()
		if err == nil {
			s.stream = stream
			return nil
		}
		failure = err
	}
	return failure
}

func (s *ResumingStream[Message]) canResume(failure error) bool {
	var known *Error
	if !errors.As(failure, &known) || !s.isAccepted || s.numResumes >= s.maxResumes || !s.request.canBeResumed() {
		return false
	}
	// A server that has not yet noticed the end of the broken stream still knows its id as in flight.
	isHeld := s.numResumes > 0 && known.Reason == "DUPLICATE_REQUEST"
	return known.Code == codes.Unavailable || known.Reason == "SLOW_CLIENT" || isHeld
}

func (s *ResumingStream[Message]) wait(failure error) error {
	delay := maxBackoff
	if backoff := firstBackoff << s.numResumes; 0 < backoff && backoff < maxBackoff {
		delay = backoff
	}
	var known *Error
	if errors.As(failure, &known) && known.RetryDelay > 0 {
		delay = known.RetryDelay
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}
