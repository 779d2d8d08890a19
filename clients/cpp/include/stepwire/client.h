// A client of one stepwire server; may be used by many threads.
//
// Requests and answers are the protobuf messages of stepwire.v1, so every field of the API is reachable and documented
// in one place. Every failed call throws CallError. A stream is never repeated: after Accepted that would generate
// twice; see ResumingStream.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "stepwire/call_error.h"
#include "stepwire/call_options.h"
#include "stepwire/resuming_stream.h"
#include "stepwire/stream.h"
#include "stepwire/v1/chat_service.grpc.pb.h"
#include "stepwire/v1/embedding_service.grpc.pb.h"
#include "stepwire/v1/generation_service.grpc.pb.h"
#include "stepwire/v1/model_service.grpc.pb.h"
#include "stepwire/v1/tokenization_service.grpc.pb.h"

namespace stepwire {

// Of a connection. The defaults make a plain one without a token.
struct Options {
  // Sent with each call as a bearer token; empty = none.
  std::string token;
  // TLS, for example grpc::SslCredentials({ca_pem}); null = a plain connection.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  // Whose share of the engines the calls use; empty = that of all without one.
  std::string client_class;
};

class Client {
 public:
  // `target` is "host:port". Does not wait for the server: an unreachable one fails the first call.
  explicit Client(const std::string& target, const Options& options = {});

  // The whole answer at once.
  v1::GenerateResponse Generate(const v1::GenerateRequest& request, const CallOptions& options = {}) const;
  // Accepted, then deltas, then one Finished for each choice.
  Stream<v1::GenerateStreamResponse> GenerateStream(const v1::GenerateRequest& request,
                                                    const CallOptions& options = {}) const;
  // The same, over broken streams: see ResumingStream. The client must outlive the stream.
  ResumingStream<v1::GenerateRequest, v1::GenerateStreamResponse> GenerateResuming(
      const v1::GenerateRequest& request, int max_resumes, const CallOptions& options = {}) const;
  // Ends requests by id; unknown and finished ids are no error.
  v1::AbortResponse Abort(const v1::AbortRequest& request, const CallOptions& options = {}) const;

  // The whole message of each choice; it can go into the next request as it is.
  v1::ChatResponse Chat(const v1::ChatRequest& request, const CallOptions& options = {}) const;
  Stream<v1::ChatStreamResponse> ChatStream(const v1::ChatRequest& request, const CallOptions& options = {}) const;
  ResumingStream<v1::ChatRequest, v1::ChatStreamResponse> ChatResuming(const v1::ChatRequest& request, int max_resumes,
                                                                       const CallOptions& options = {}) const;

  // One vector for each input, in order; one input that fails is the failure of all.
  v1::EmbedResponse Embed(const v1::EmbedRequest& request, const CallOptions& options = {}) const;

  v1::TokenizeResponse Tokenize(const v1::TokenizeRequest& request, const CallOptions& options = {}) const;
  v1::DetokenizeResponse Detokenize(const v1::DetokenizeRequest& request, const CallOptions& options = {}) const;
  v1::ListModelsResponse ListModels(const v1::ListModelsRequest& request, const CallOptions& options = {}) const;

 private:
  std::unique_ptr<grpc::ClientContext> NewContext(const CallOptions& options) const;

  template <class Stub, class Request, class Response>
  Response Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                const Request& request, const CallOptions& options) const;

  Metadata metadata_;
  std::unique_ptr<v1::GenerationService::Stub> generation_;
  std::unique_ptr<v1::ChatService::Stub> chat_;
  std::unique_ptr<v1::EmbeddingService::Stub> embedding_;
  std::unique_ptr<v1::TokenizationService::Stub> tokenization_;
  std::unique_ptr<v1::ModelService::Stub> models_;
};

}  // namespace stepwire
