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

// firstBackoff is the wait before the first resumption where the server does not say one; it doubles each time.
const firstBackoff = 100 * time.Millisecond

// ResumingStream is a generation that outlives broken streams.
type ResumingStream struct {
	ctx        context.Context
	client     *Client
	options    []grpc.CallOption
	request    *v1.GenerateRequest
	maxResumes int
	resumes    int
	stream     v1.GenerationService_GenerateStreamClient
	isAccepted bool
	isPrompted bool
	numSent    uint64
}

// GenerateResuming streams like GenerateStream. When the stream breaks after Accepted (the server went away, or gave up
// on a client that was too slow) it is opened again, at most maxResumes times, where it broke: with the tokens received
// so far and the seed of Accepted, so that the answer is the one of an unbroken stream. Deltas carry token ids whatever
// the request says. Only requests of one choice can be resumed. The usage counts what the last stream generated.
func (c *Client) GenerateResuming(
	ctx context.Context, request *v1.GenerateRequest, maxResumes int, options ...grpc.CallOption,
) (*ResumingStream, error) {
	request = proto.Clone(request).(*v1.GenerateRequest)
	if request.Output == nil {
		request.Output = &v1.OutputOptions{}
	}
	request.Output.TokenIds = true
	stream, err := c.GenerateStream(ctx, request, options...)
	if err != nil {
		return nil, err
	}
	return &ResumingStream{
		ctx: ctx, client: c, options: options, request: request, maxResumes: maxResumes, stream: stream,
	}, nil
}

// Recv gives the next message, or io.EOF after the last one. Its index counts over all streams.
func (s *ResumingStream) Recv() (*v1.GenerateStreamResponse, error) {
	for {
		message, err := s.stream.Recv()
		if err != nil {
			if err = s.reopen(err); err != nil {
				return nil, err
			}
			continue
		}
		if s.note(message) {
			message.Index = s.numSent
			s.numSent++
			return message, nil
		}
	}
}

// note keeps what a resumption needs of a message, and reports whether the caller has yet to see it.
func (s *ResumingStream) note(message *v1.GenerateStreamResponse) bool {
	isNew := true
	switch event := message.Event.(type) {
	case *v1.GenerateStreamResponse_Accepted_:
		isNew, s.isAccepted = !s.isAccepted, true
		if s.request.Sampling == nil {
			s.request.Sampling = &v1.SamplingParams{}
		}
		s.request.Sampling.Seed = proto.Int64(event.Accepted.Seed)
	case *v1.GenerateStreamResponse_Prompt:
		isNew, s.isPrompted = !s.isPrompted, true
	case *v1.GenerateStreamResponse_Delta_:
		if s.request.ResumeOutputTokenIds == nil {
			s.request.ResumeOutputTokenIds = &v1.TokenIds{}
		}
		resumed := s.request.ResumeOutputTokenIds
		resumed.Ids = append(resumed.Ids, event.Delta.TokenIds...)
	}
	return isNew
}

// reopen opens the stream again where that can help, else it returns the failure.
func (s *ResumingStream) reopen(failure error) error {
	for s.canResume(failure) {
		if err := s.wait(failure); err != nil {
			return asError(status.FromContextError(err).Err())
		}
		s.resumes++
		stream, err := s.client.GenerateStream(s.ctx, s.request, s.options...)
		if err == nil {
			s.stream = stream
			return nil
		}
		failure = err
	}
	return failure
}

func (s *ResumingStream) canResume(failure error) bool {
	var known *Error
	if !errors.As(failure, &known) || !s.isAccepted || s.resumes >= s.maxResumes || s.request.Sampling.GetN() > 1 {
		return false
	}
	// With nothing left to generate the server would refuse the request, which says less than this failure.
	if max := s.request.GetStop().GetMaxTokens(); max > 0 && len(s.request.ResumeOutputTokenIds.GetIds()) >= int(max) {
		return false
	}
	// A server that has not yet noticed the end of the broken stream still knows the id as in flight.
	isHeld := s.resumes > 0 && known.Reason == "DUPLICATE_REQUEST"
	return known.Code == codes.Unavailable || known.Reason == "SLOW_CLIENT" || isHeld
}

func (s *ResumingStream) wait(failure error) error {
	delay := firstBackoff << s.resumes
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
