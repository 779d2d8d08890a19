package stepwire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error is a failed call, with everything that the server said about it. It never holds text of a prompt or an answer.
type Error struct {
	Code    codes.Code
	Message string
	// stepwire's own reason, such as QUEUE_FULL; empty when no server answered.
	Reason string
	// Of the ErrorInfo: request_id, engine_id, tokens_emitted, retryable, and more by reason.
	Metadata map[string]string
	// How long the server asks to wait before another try; 0 = it does not say.
	RetryDelay time.Duration
	Violations []FieldViolation
	// The limits of the caller's own that were reached.
	Quota []QuotaViolation
	cause error
}

// FieldViolation is one field that the server refused, by its path in the request.
type FieldViolation struct {
	Field       string
	Description string
}

// QuotaViolation is one limit of the caller's own: whose it is, and what was used up.
type QuotaViolation struct {
	Subject     string
	Description string
}

func (e *Error) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("%s %s: %s", e.Code, e.Reason, e.Message)
}

// Unwrap gives gRPC's own error.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus lets status.FromError see through this error.
func (e *Error) GRPCStatus() *status.Status { return status.Convert(e.cause) }

// Retryable reports whether the server says that the same request may succeed later.
func (e *Error) Retryable() bool { return e.Metadata["retryable"] == "true" }

// TokensEmitted is how many output tokens the server had sent before the call failed.
func (e *Error) TokensEmitted() int {
	tokens, _ := strconv.Atoi(e.Metadata["tokens_emitted"])
	return tokens
}

func (e *Error) withTokensEmitted(tokens int) *Error {
	changed := *e
	changed.Metadata = map[string]string{}
	for key, value := range e.Metadata {
		changed.Metadata[key] = value
	}
	changed.Metadata["tokens_emitted"] = strconv.Itoa(tokens)
	return &changed
}

// asError turns gRPC's error into ours; the end of a stream and ours stay what they are.
func asError(err error) error {
	var known *Error
	if err == nil || err == io.EOF || errors.As(err, &known) {
		return err
	}
	called := status.Convert(err)
	failure := &Error{Code: called.Code(), Message: called.Message(), cause: err}
	for _, detail := range called.Details() {
		failure.add(detail)
	}
	return failure
}

func (e *Error) add(detail interface{}) {
	switch detail := detail.(type) {
	case *errdetails.ErrorInfo:
		e.Reason, e.Metadata = detail.GetReason(), detail.GetMetadata()
	case *errdetails.RetryInfo:
		delay := detail.GetRetryDelay()
		e.RetryDelay = time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
	case *errdetails.BadRequest:
		for _, violation := range detail.GetFieldViolations() {
			e.Violations = append(e.Violations, FieldViolation{violation.GetField(), violation.GetDescription()})
		}
	case *errdetails.QuotaFailure:
		for _, violation := range detail.GetViolations() {
			e.Quota = append(e.Quota, QuotaViolation{violation.GetSubject(), violation.GetDescription()})
		}
	}
}

func unaryErrors(
	ctx context.Context, method string, request, reply interface{}, connection *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	return asError(invoke(ctx, method, request, reply, connection, options...))
}

func streamErrors(
	ctx context.Context, description *grpc.StreamDesc, connection *grpc.ClientConn, method string,
	open grpc.Streamer, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	stream, err := open(ctx, description, connection, method, options...)
	if err != nil {
		return nil, asError(err)
	}
	return errorStream{stream}, nil
}

type errorStream struct{ grpc.ClientStream }

func (s errorStream) SendMsg(message interface{}) error {
	return asError(s.ClientStream.SendMsg(message))
}

func (s errorStream) RecvMsg(message interface{}) error {
	return asError(s.ClientStream.RecvMsg(message))
}
