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
// and the seed of Accepted, so that the answer is the one of an unbroken stream, sampled or not, and nothing comes
// twice. Only answers of one choice without an echo of the prompt can be resumed. The context's deadline holds for all
// streams together; the timings are those of the last one.
type ResumingStream[Message proto.Message] struct {
	ctx        context.Context
	open       func(context.Context) (receiver[Message], error)
	read       func(Message) event
	answer     *answer
	maxResumes int
	numResumes int
	stream     receiver[Message]
	// Ends the stream of now.
	cancel context.CancelFunc
}

// GenerateResuming streams like GenerateStream, over broken streams, of which it opens at most maxResumes again.
func (c *Client) GenerateResuming(
	ctx context.Context, request *v1.GenerateRequest, maxResumes int, options ...grpc.CallOption,
) (*ResumingStream[*v1.GenerateStreamResponse], error) {
	request = proto.Clone(request).(*v1.GenerateRequest)
	fields := requestFields{&request.RequestId, &request.Sampling, &request.Output, &request.ResumeOutputTokenIds}
	open := func(ctx context.Context) (receiver[*v1.GenerateStreamResponse], error) {
		return c.GenerateStream(ctx, request, options...)
	}
	return resuming(ctx, open, readGeneration, fields, maxResumes)
}

// ChatResuming streams like ChatStream, over broken streams, of which it opens at most maxResumes again.
func (c *Client) ChatResuming(
	ctx context.Context, request *v1.ChatRequest, maxResumes int, options ...grpc.CallOption,
) (*ResumingStream[*v1.ChatStreamResponse], error) {
	request = proto.Clone(request).(*v1.ChatRequest)
	fields := requestFields{&request.RequestId, &request.Sampling, &request.Output, &request.ResumeOutputTokenIds}
	open := func(ctx context.Context) (receiver[*v1.ChatStreamResponse], error) {
		return c.ChatStream(ctx, request, options...)
	}
	return resuming(ctx, open, readChat, fields, maxResumes)
}

func resuming[Message proto.Message](
	ctx context.Context, open func(context.Context) (receiver[Message], error), read func(Message) event,
	request requestFields, maxResumes int,
) (*ResumingStream[Message], error) {
	stream := &ResumingStream[Message]{
		ctx: ctx, open: open, read: read, answer: newAnswer(request), maxResumes: maxResumes,
	}
	if err := stream.start(); err != nil {
		return nil, err
	}
	return stream, nil
}

func (s *ResumingStream[Message]) start() (err error) {
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(s.ctx)
	s.stream, err = s.open(ctx)
	if err != nil {
		s.cancel()
	}
	return err
}

// Recv gives the next message, or io.EOF after the last one. The index of the messages counts over all streams.
func (s *ResumingStream[Message]) Recv() (Message, error) {
	var none Message
	for {
		message, isNew, err := s.next()
		if isNew && err == nil {
			return message, nil
		}
		if err != nil {
			if err = s.reopen(err); err != nil {
				return none, err
			}
		}
	}
}

// next takes one message of the stream, and reports whether the caller has yet to see what is left of it.
func (s *ResumingStream[Message]) next() (Message, bool, error) {
	message, err := s.stream.Recv()
	isNew := false
	if err == nil {
		isNew, err = s.answer.take(s.read(message))
	}
	if err != nil {
		// A stream that has diverged still runs; for others this only frees what belongs to them.
		s.cancel()
	}
	return message, isNew, err
}

// reopen opens the stream again where that can help, else it returns the failure, with the tokens of all streams.
func (s *ResumingStream[Message]) reopen(failure error) error {
	for s.canResume(failure) {
		if err := s.wait(failure); err != nil {
			return asError(status.FromContextError(err).Err())
		}
		s.numResumes++
		s.answer.prepare()
		if failure = s.start(); failure == nil {
			return nil
		}
	}
	var known *Error
	if errors.As(failure, &known) && s.numResumes > 0 {
		return known.withTokensEmitted(s.answer.numTokens())
	}
	return failure
}

func (s *ResumingStream[Message]) canResume(failure error) bool {
	var known *Error
	if !errors.As(failure, &known) || s.answer.accepted == nil || s.numResumes >= s.maxResumes {
		return false
	}
	// A server that has not yet noticed the end of the broken stream still knows its id as in flight.
	isHeld := s.numResumes > 0 && known.Reason == "DUPLICATE_REQUEST"
	isBroken := known.Code == codes.Unavailable || known.Reason == "SLOW_CLIENT" || isHeld
	return isBroken && s.answer.request.canBeResumed()
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
