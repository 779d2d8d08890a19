package main

import (
	"context"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"stepwire"
	v1 "stepwire/v1"
)

// method is how one RPC is called; received is given each message of the answer.
type method struct {
	newRequest func() proto.Message
	run        func(
		ctx context.Context, client *stepwire.Client, request proto.Message, isResuming bool,
		received func(proto.Message) error, trailer grpc.CallOption,
	) error
}

// maxResumes is how often a call with "resume" is opened again.
const maxResumes = 2

var methods = map[string]method{
	"stepwire.v1.GenerationService/Generate":       unary((*stepwire.Client).Generate),
	"stepwire.v1.GenerationService/GenerateStream": streamed(openGeneration),
	"stepwire.v1.GenerationService/Abort":          unary((*stepwire.Client).Abort),
	"stepwire.v1.ChatService/Chat":                 unary((*stepwire.Client).Chat),
	"stepwire.v1.ChatService/ChatStream":           streamed(openChat),
	"stepwire.v1.EmbeddingService/Embed":           unary((*stepwire.Client).Embed),
	"stepwire.v1.TokenizationService/Tokenize":     unary((*stepwire.Client).Tokenize),
	"stepwire.v1.TokenizationService/Detokenize":   unary((*stepwire.Client).Detokenize),
	"stepwire.v1.ModelService/ListModels":          unary((*stepwire.Client).ListModels),
}

// pointer is a protobuf message by its struct.
type pointer[Struct any] interface {
	*Struct
	proto.Message
}

// receiver is a stream of messages.
type receiver[Response proto.Message] interface{ Recv() (Response, error) }

func unary[Request any, RequestPointer pointer[Request], Response proto.Message](
	invoke func(*stepwire.Client, context.Context, RequestPointer, ...grpc.CallOption) (Response, error),
) method {
	return method{
		newRequest: func() proto.Message { return RequestPointer(new(Request)) },
		run: func(
			ctx context.Context, client *stepwire.Client, request proto.Message, _ bool,
			received func(proto.Message) error, trailer grpc.CallOption,
		) error {
			response, err := invoke(client, ctx, request.(RequestPointer), trailer)
			if err != nil {
				return err
			}
			return received(response)
		},
	}
}

func streamed[Request any, RequestPointer pointer[Request], Response proto.Message](
	open func(context.Context, *stepwire.Client, RequestPointer, bool, grpc.CallOption) (receiver[Response], error),
) method {
	return method{
		newRequest: func() proto.Message { return RequestPointer(new(Request)) },
		run: func(
			ctx context.Context, client *stepwire.Client, request proto.Message, isResuming bool,
			received func(proto.Message) error, trailer grpc.CallOption,
		) error {
			stream, err := open(ctx, client, request.(RequestPointer), isResuming, trailer)
			if err != nil {
				return err
			}
			return receiveAll(stream, received)
		},
	}
}

func receiveAll[Response proto.Message](stream receiver[Response], received func(proto.Message) error) error {
	for {
		message, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := received(message); err != nil {
			return err
		}
	}
}

func openGeneration(
	ctx context.Context, client *stepwire.Client, request *v1.GenerateRequest, isResuming bool, trailer grpc.CallOption,
) (receiver[*v1.GenerateStreamResponse], error) {
	if isResuming {
		return client.GenerateResuming(ctx, request, maxResumes, trailer)
	}
	return client.GenerateStream(ctx, request, trailer)
}

func openChat(
	ctx context.Context, client *stepwire.Client, request *v1.ChatRequest, isResuming bool, trailer grpc.CallOption,
) (receiver[*v1.ChatStreamResponse], error) {
	if isResuming {
		return client.ChatResuming(ctx, request, maxResumes, trailer)
	}
	return client.ChatStream(ctx, request, trailer)
}
