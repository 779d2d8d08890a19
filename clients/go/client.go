// Package stepwire is a client of one stepwire server.
//
// Requests and answers are the protobuf messages of stepwire.v1, so every field of the API is reachable and documented
// in one place. A deadline or a cancelled context ends a call, and with it the request in the engine. Every failed call
// is an *Error. A stream is never repeated: after Accepted that would generate twice; see GenerateResuming.
package stepwire

import (
	"context"
	_ "embed" // for the service config
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	v1 "stepwire/v1"
)

// maxMessageBytes is the server's own limit; gRPC's default of 4 MiB fails large answers.
const maxMessageBytes = 64 << 20

const clientClassKey = "x-gateway-inference-fairness-id"

// serviceConfig says which calls gRPC retries by itself; the same for clients in every language.
//
//go:embed service_config.json
var serviceConfig string

// Options of a connection. The zero value is a plain connection without a token.
type Options struct {
	// Sent with each call as a bearer token; empty = none.
	Token string
	// TLS, for example credentials.NewClientTLSFromFile("ca.pem", ""); nil = a plain connection.
	TransportCredentials credentials.TransportCredentials
	// Whose share of the engines the calls use; empty = that of all without one.
	ClientClass string
	// Further options of gRPC, applied last.
	DialOptions []grpc.DialOption
}

// Client is one connection. It has all methods of the embedded services and may be used by many goroutines.
type Client struct {
	v1.GenerationServiceClient
	v1.ChatServiceClient
	v1.EmbeddingServiceClient
	v1.TokenizationServiceClient
	v1.ModelServiceClient
	connection *grpc.ClientConn
}

// Connect makes a client of the server at target, "host:port". It does not wait for the server: an unreachable one
// fails the first call.
func Connect(target string, options Options) (*Client, error) {
	connection, err := grpc.Dial(target, append(dialOptions(options), options.DialOptions...)...)
	if err != nil {
		return nil, err
	}
	return &Client{
		GenerationServiceClient:   v1.NewGenerationServiceClient(connection),
		ChatServiceClient:         v1.NewChatServiceClient(connection),
		EmbeddingServiceClient:    v1.NewEmbeddingServiceClient(connection),
		TokenizationServiceClient: v1.NewTokenizationServiceClient(connection),
		ModelServiceClient:        v1.NewModelServiceClient(connection),
		connection:                connection,
	}, nil
}

// Close cancels every call that still runs.
func (c *Client) Close() error { return c.connection.Close() }

func dialOptions(options Options) []grpc.DialOption {
	transport := grpc.WithInsecure()
	if options.TransportCredentials != nil {
		transport = grpc.WithTransportCredentials(options.TransportCredentials)
	}
	return []grpc.DialOption{
		transport,
		grpc.WithPerRPCCredentials(callMetadata(options)),
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDefaultCallOptions(
			grpc.ForceCodec(codec{}),
			grpc.MaxCallRecvMsgSize(maxMessageBytes),
			grpc.MaxCallSendMsgSize(maxMessageBytes),
		),
		grpc.WithChainUnaryInterceptor(unaryErrors),
		grpc.WithChainStreamInterceptor(streamErrors),
	}
}

// callMetadata is what goes with each call.
type callMetadata Options

func (m callMetadata) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	metadata := map[string]string{}
	if m.Token != "" {
		metadata["authorization"] = "Bearer " + m.Token
	}
	if m.ClientClass != "" {
		metadata[clientClassKey] = m.ClientClass
	}
	return metadata, nil
}

// RequireTransportSecurity is false: whether a network may see a token is the caller's choice, by TransportCredentials.
func (callMetadata) RequireTransportSecurity() bool { return false }
