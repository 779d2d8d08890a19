// conformance TARGET [CA_FILE]: makes the calls that it reads from standard input, one JSON object a line, and writes
// what came of each.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>

#include "call.h"

namespace conformance {
namespace {

using google::protobuf::Struct;
using google::protobuf::Value;

const Value& Field(const Struct& object, const std::string& name) {
  const auto found = object.fields().find(name);
  return found == object.fields().end() ? Value::default_instance() : found->second;
}

Call ParseCall(const std::string& line) {
  Struct envelope;
  FromJson(line, &envelope);
  Call call;
  call.method = Field(envelope, "method").string_value();
  call.request = ToJson(Field(envelope, "request").struct_value());
  call.options.timeout = std::chrono::milliseconds(static_cast<int>(Field(envelope, "timeout_ms").number_value()));
  call.cancel_after_messages = static_cast<int>(Field(envelope, "cancel_after_messages").number_value());
  call.resume = Field(envelope, "resume").bool_value();
  for (const auto& [key, value] : Field(envelope, "metadata").struct_value().fields()) {
    call.options.metadata.emplace(key, value.string_value());
  }
  return call;
}

void SetString(Struct* object, const std::string& name, const std::string& value) {
  (*object->mutable_fields())[name].set_string_value(value);
}

void SetError(const stepwire::CallError& error, Struct* reply) {
  SetString(reply, "code", stepwire::CodeName(error.code));
  SetString(reply, "message", error.message);
  SetString(reply, "reason", error.reason);
  auto& fields = *reply->mutable_fields();
  fields["retry_delay_ms"].set_number_value(static_cast<double>(error.retry_delay.count()));
  for (const auto& [key, value] : error.metadata) {
    SetString(fields["error_metadata"].mutable_struct_value(), key, value);
  }
  for (const auto& violation : error.violations) {
    auto* item = fields["field_violations"].mutable_list_value()->add_values()->mutable_struct_value();
    SetString(item, "field", violation.field);
    SetString(item, "description", violation.description);
  }
  for (const auto& violation : error.quota) {
    auto* item = fields["quota_violations"].mutable_list_value()->add_values()->mutable_struct_value();
    SetString(item, "subject", violation.subject);
    SetString(item, "description", violation.description);
  }
}

void SetTrailers(const stepwire::Metadata& trailers, Struct* reply) {
  auto& fields = *reply->mutable_fields();
  fields["pushback_ms"].set_null_value(google::protobuf::NULL_VALUE);
  auto* texts = fields["trailers"].mutable_struct_value();
  for (const auto& [key, value] : trailers) {
    const bool is_binary = key.size() > 4 && key.compare(key.size() - 4, 4, "-bin") == 0;
    if (!is_binary) SetString(texts, key, value);
    if (key == "grpc-retry-pushback-ms") fields["pushback_ms"].set_number_value(std::atof(value.c_str()));
  }
}

Struct EmptyReply() {
  Struct reply;
  auto& fields = *reply.mutable_fields();
  SetString(&reply, "code", "OK");
  fields["messages"].mutable_list_value();
  fields["error_metadata"].mutable_struct_value();
  fields["field_violations"].mutable_list_value();
  fields["quota_violations"].mutable_list_value();
  return reply;
}

Struct Answer(const stepwire::Client& client, Call call) {
  Struct reply = EmptyReply();
  auto* messages = (*reply.mutable_fields())["messages"].mutable_list_value();
  stepwire::Metadata trailers;
  call.options.trailers = &trailers;
  const auto receive = [&](const google::protobuf::Message& message) {
    FromJson(ToJson(message), messages->add_values()->mutable_struct_value());
    return messages->values_size() != call.cancel_after_messages;
  };
  try {
    FindMethod(call.method)(client, call, receive);
  } catch (const stepwire::CallError& error) {
    SetError(error, &reply);
  }
  SetTrailers(trailers, &reply);
  return reply;
}

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument(std::string("cannot read ") + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

stepwire::Options MakeOptions(const char* ca_file) {
  stepwire::Options options;
  if (const char* token = std::getenv("STEPWIRE_TOKEN")) options.token = token;
  if (ca_file != nullptr) options.credentials = grpc::SslCredentials({ReadFile(ca_file), "", ""});
  return options;
}

int Main(int argc, char** argv) {
  if (argc < 2) throw std::invalid_argument("usage: conformance TARGET [CA_FILE]");
  const stepwire::Client client(argv[1], MakeOptions(argc > 2 ? argv[2] : nullptr));
  for (std::string line; std::getline(std::cin, line);) {
    if (!line.empty()) std::cout << ToJson(Answer(client, ParseCall(line))) << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace conformance

int main(int argc, char** argv) {
  try {
    return conformance::Main(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
