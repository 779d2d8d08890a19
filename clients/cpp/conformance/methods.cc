#include <google/protobuf/util/json_util.h>

#include <map>
#include <stdexcept>

#include "call.h"

namespace conformance {
namespace {

using stepwire::CallOptions;
using stepwire::Client;
namespace v1 = stepwire::v1;

// How often a call with "resume" is opened again.
constexpr int kMaxResumes = 2;

template <class Request>
Request Parse(const Call& call) {
  Request request;
  FromJson(call.request, &request);
  return request;
}

template <class Request, class Response>
Method Unary(Response (Client::*method)(const Request&, const CallOptions&) const) {
  return [method](const Client& client, const Call& call, const Receive& receive) {
    receive((client.*method)(Parse<Request>(call), call.options));
  };
}

// What comes behind a cancellation is not the caller's any more.
template <class Message, class AnyStream>
void ReceiveAll(AnyStream stream, const Receive& receive) {
  Message message;
  bool is_wanted = true;
  while (stream.Next(&message)) {
    if (is_wanted && !receive(message)) {
      is_wanted = false;
      stream.Cancel();
    }
  }
}

void GenerateStream(const Client& client, const Call& call, const Receive& receive) {
  using Message = v1::GenerateStreamResponse;
  const auto request = Parse<v1::GenerateRequest>(call);
  if (call.resume) {
    ReceiveAll<Message>(client.GenerateResuming(request, kMaxResumes, call.options), receive);
  } else {
    ReceiveAll<Message>(client.GenerateStream(request, call.options), receive);
  }
}

void ChatStream(const Client& client, const Call& call, const Receive& receive) {
  using Message = v1::ChatStreamResponse;
  const auto request = Parse<v1::ChatRequest>(call);
  if (call.resume) {
    ReceiveAll<Message>(client.ChatResuming(request, kMaxResumes, call.options), receive);
  } else {
    ReceiveAll<Message>(client.ChatStream(request, call.options), receive);
  }
}

const std::map<std::string, Method>& Methods() {
  static const std::map<std::string, Method> methods = {
      {"stepwire.v1.GenerationService/Generate", Unary(&Client::Generate)},
      {"stepwire.v1.GenerationService/GenerateStream", GenerateStream},
      {"stepwire.v1.GenerationService/Abort", Unary(&Client::Abort)},
      {"stepwire.v1.ChatService/Chat", Unary(&Client::Chat)},
      {"stepwire.v1.ChatService/ChatStream", ChatStream},
      {"stepwire.v1.EmbeddingService/Embed", Unary(&Client::Embed)},
      {"stepwire.v1.TokenizationService/Tokenize", Unary(&Client::Tokenize)},
      {"stepwire.v1.TokenizationService/Detokenize", Unary(&Client::Detokenize)},
      {"stepwire.v1.ModelService/ListModels", Unary(&Client::ListModels)},
  };
  return methods;
}

}  // namespace

const Method& FindMethod(const std::string& name) {
  const auto found = Methods().find(name);
  if (found == Methods().end()) throw std::invalid_argument("unknown method " + name);
  return found->second;
}

void FromJson(const std::string& json, google::protobuf::Message* message) {
  const auto status = google::protobuf::util::JsonStringToMessage(json, message);
  if (!status.ok()) throw std::invalid_argument(status.ToString());
}

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (!status.ok()) throw std::invalid_argument(status.ToString());
  return json;
}

}  // namespace conformance
