// One line in, one call made, one line out. Knows no scenario and expects nothing: tests/conformance does.
#pragma once

#include <google/protobuf/struct.pb.h>

#include <functional>
#include <string>

#include "stepwire/client.h"

namespace conformance {

// A line of the input. `request` is JSON of the method's own message.
struct Call {
  std::string method;
  std::string request;
  stepwire::CallOptions options;
  int cancel_after_messages = 0;
  bool resume = false;
};

// Given each message of an answer as JSON; false = cancel the call.
using Receive = std::function<bool(const google::protobuf::Message&)>;

// Runs one RPC to its end. Throws CallError when it fails, and std::invalid_argument when the line makes no sense.
using Method = std::function<void(const stepwire::Client&, const Call&, const Receive&)>;

const Method& FindMethod(const std::string& name);

// Throws std::invalid_argument, naming what does not parse.
void FromJson(const std::string& json, google::protobuf::Message* message);

std::string ToJson(const google::protobuf::Message& message);

}  // namespace conformance
