#include "stepwire/client.h"

#include <utility>

namespace stepwire {
namespace {

// The server's own limit; gRPC's default of 4 MiB fails large answers.
constexpr int kMaxMessageBytes = 64 << 20;

// Which calls gRPC retries by itself; the same for clients in every language.
constexpr char kServiceConfig[] =
#include "stepwire/service_config.inc"
    ;

grpc::ChannelArguments ChannelArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetServiceConfigJSON(kServiceConfig);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5'000);
  return arguments;
}

Metadata OwnMetadata(const Options& options) {
  Metadata metadata;
  if (!options.token.empty()) metadata.emplace("authorization", "Bearer " + options.token);
  if (!options.client_class.empty()) metadata.emplace("x-gateway-inference-fairness-id", options.client_class);
  return metadata;
}

}  // namespace

void CopyTrailers(const grpc::ClientContext& context, Metadata* trailers) {
  if (trailers == nullptr) return;
  for (const auto& [key, value] : context.GetServerTrailingMetadata()) {
    trailers->emplace(std::string(key.data(), key.size()), std::string(value.data(), value.size()));
  }
}

Client::Client(const std::string& target, const Options& options) : metadata_(OwnMetadata(options)) {
  const auto credentials = options.credentials ? options.credentials : grpc::InsecureChannelCredentials();
  const auto channel = grpc::CreateCustomChannel(target, credentials, ChannelArguments());
  generation_ = v1::GenerationService::NewStub(channel);
  chat_ = v1::ChatService::NewStub(channel);
  embedding_ = v1::EmbeddingService::NewStub(channel);
  tokenization_ = v1::TokenizationService::NewStub(channel);
  models_ = v1::ModelService::NewStub(channel);
}

std::unique_ptr<grpc::ClientContext> Client::NewContext(const CallOptions& options) const {
  auto context = std::make_unique<grpc::ClientContext>();
  for (const auto* metadata : {&metadata_, &options.metadata}) {
    for (const auto& [key, value] : *metadata) context->AddMetadata(key, value);
  }
  if (options.timeout.count() > 0) context->set_deadline(std::chrono::system_clock::now() + options.timeout);
  return context;
}

template <class Stub, class Request, class Response>
Response Client::Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                      const Request& request, const CallOptions& options) const {
  const auto context = NewContext(options);
  Response response;
  const grpc::Status status = (stub.*method)(context.get(), request, &response);
  CopyTrailers(*context, options.trailers);
  if (!status.ok()) throw CallError(status);
  return response;
}

v1::GenerateResponse Client::Generate(const v1::GenerateRequest& request, const CallOptions& options) const {
  return Call(*generation_, &v1::GenerationService::Stub::Generate, request, options);
}

Stream<v1::GenerateStreamResponse> Client::GenerateStream(const v1::GenerateRequest& request,
                                                          const CallOptions& options) const {
  auto context = NewContext(options);
  auto reader = generation_->GenerateStream(context.get(), request);
  return {std::move(context), std::move(reader), options.trailers};
}

ResumingStream<v1::GenerateRequest, v1::GenerateStreamResponse> Client::GenerateResuming(
    const v1::GenerateRequest& request, int max_resumes, const CallOptions& options) const {
  const auto open = [this](const auto& asked, const auto& how) { return GenerateStream(asked, how); };
  return {open, request, max_resumes, options};
}

v1::AbortResponse Client::Abort(const v1::AbortRequest& request, const CallOptions& options) const {
  return Call(*generation_, &v1::GenerationService::Stub::Abort, request, options);
}

v1::ChatResponse Client::Chat(const v1::ChatRequest& request, const CallOptions& options) const {
  return Call(*chat_, &v1::ChatService::Stub::Chat, request, options);
}

Stream<v1::ChatStreamResponse> Client::ChatStream(const v1::ChatRequest& request, const CallOptions& options) const {
  auto context = NewContext(options);
  auto reader = chat_->ChatStream(context.get(), request);
  return {std::move(context), std::move(reader), options.trailers};
}

ResumingStream<v1::ChatRequest, v1::ChatStreamResponse> Client::ChatResuming(const v1::ChatRequest& request,
                                                                            int max_resumes,
                                                                            const CallOptions& options) const {
  const auto open = [this](const auto& asked, const auto& how) { return ChatStream(asked, how); };
  return {open, request, max_resumes, options};
}

v1::EmbedResponse Client::Embed(const v1::EmbedRequest& request, const CallOptions& options) const {
  return Call(*embedding_, &v1::EmbeddingService::Stub::Embed, request, options);
}

v1::TokenizeResponse Client::Tokenize(const v1::TokenizeRequest& request, const CallOptions& options) const {
  return Call(*tokenization_, &v1::TokenizationService::Stub::Tokenize, request, options);
}

v1::DetokenizeResponse Client::Detokenize(const v1::DetokenizeRequest& request, const CallOptions& options) const {
  return Call(*tokenization_, &v1::TokenizationService::Stub::Detokenize, request, options);
}

v1::ListModelsResponse Client::ListModels(const v1::ListModelsRequest& request, const CallOptions& options) const {
  return Call(*models_, &v1::ModelService::Stub::ListModels, request, options);
}

}  // namespace stepwire
