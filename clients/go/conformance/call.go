package main

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"stepwire"
)

// call is one line of the input.
type call struct {
	Method              string            `json:"method"`
	Request             json.RawMessage   `json:"request"`
	TimeoutMs           int64             `json:"timeout_ms"`
	CancelAfterMessages int               `json:"cancel_after_messages"`
	Metadata            map[string]string `json:"metadata"`
	Resume              bool              `json:"resume"`
}

// result is one line of the output.
type result struct {
	Messages        []json.RawMessage `json:"messages"`
	Code            string            `json:"code"`
	Message         string            `json:"message"`
	Reason          string            `json:"reason"`
	ErrorMetadata   map[string]string `json:"error_metadata"`
	RetryDelayMs    int64             `json:"retry_delay_ms"`
	FieldViolations []violation       `json:"field_violations"`
	QuotaViolations []quotaViolation  `json:"quota_violations"`
	Trailers        map[string]string `json:"trailers"`
	PushbackMs      *int64            `json:"pushback_ms"`
}

type violation struct {
	Field       string `json:"field"`
	Description string `json:"description"`
}

type quotaViolation struct {
	Subject     string `json:"subject"`
	Description string `json:"description"`
}

// answer runs the call to its end. An error is one of this program, not of the call.
func (c *call) answer(client *stepwire.Client, method method) (*result, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if c.TimeoutMs > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(c.TimeoutMs)*time.Millisecond)
		defer cancel()
	}
	for key, value := range c.Metadata {
		ctx = metadata.AppendToOutgoingContext(ctx, key, value)
	}
	request := method.newRequest()
	if len(c.Request) > 0 {
		if err := protojson.Unmarshal(c.Request, request); err != nil {
			return nil, err
		}
	}
	made := &result{
		Messages: []json.RawMessage{}, Code: "OK", ErrorMetadata: map[string]string{},
		FieldViolations: []violation{}, QuotaViolations: []quotaViolation{}, Trailers: map[string]string{},
	}
	var trailers metadata.MD
	received := func(message proto.Message) error {
		if ctx.Err() == context.Canceled {
			// What comes behind a cancellation is not the caller's any more.
			return nil
		}
		text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(message)
		made.Messages = append(made.Messages, text)
		if len(made.Messages) == c.CancelAfterMessages {
			cancel()
		}
		return err
	}
	err := method.run(ctx, client, request, c.Resume, received, grpc.Trailer(&trailers))
	made.setTrailers(trailers)
	return made, made.setError(err)
}

func (r *result) setTrailers(trailers metadata.MD) {
	for key, values := range trailers {
		isBinary := len(key) > 4 && key[len(key)-4:] == "-bin"
		if !isBinary && len(values) > 0 {
			r.Trailers[key] = values[0]
		}
	}
	if pushback, err := strconv.ParseInt(r.Trailers["grpc-retry-pushback-ms"], 10, 64); err == nil {
		r.PushbackMs = &pushback
	}
}

func (r *result) setError(err error) error {
	if err == nil {
		return nil
	}
	var failure *stepwire.Error
	if !errors.As(err, &failure) {
		return err
	}
	r.Code, r.Message, r.Reason = codeNames[failure.Code], failure.Message, failure.Reason
	for key, value := range failure.Metadata {
		r.ErrorMetadata[key] = value
	}
	r.RetryDelayMs = failure.RetryDelay.Milliseconds()
	for _, refused := range failure.Violations {
		r.FieldViolations = append(r.FieldViolations, violation{refused.Field, refused.Description})
	}
	for _, used := range failure.Quota {
		r.QuotaViolations = append(r.QuotaViolations, quotaViolation{used.Subject, used.Description})
	}
	return nil
}

// codeNames are the canonical ones; codes.Code prints others.
var codeNames = map[codes.Code]string{
	codes.OK: "OK", codes.Canceled: "CANCELLED", codes.Unknown: "UNKNOWN", codes.InvalidArgument: "INVALID_ARGUMENT",
	codes.DeadlineExceeded: "DEADLINE_EXCEEDED", codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS",
	codes.PermissionDenied: "PERMISSION_DENIED", codes.ResourceExhausted: "RESOURCE_EXHAUSTED",
	codes.FailedPrecondition: "FAILED_PRECONDITION", codes.Aborted: "ABORTED", codes.OutOfRange: "OUT_OF_RANGE",
	codes.Unimplemented: "UNIMPLEMENTED", codes.Internal: "INTERNAL", codes.Unavailable: "UNAVAILABLE",
	codes.DataLoss: "DATA_LOSS", codes.Unauthenticated: "UNAUTHENTICATED",
}
