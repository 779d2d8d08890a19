// What a caller says about one call beside its request.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <map>
#include <string>

namespace stepwire {

using Metadata = std::multimap<std::string, std::string>;

struct CallOptions {
  // Ends the call, and with it the request in the engine, with DEADLINE_EXCEEDED; 0 = no limit.
  std::chrono::milliseconds timeout{0};
  // Sent in addition to the client's own.
  Metadata metadata;
  // Receives the server's trailing metadata when the call ends, however it ends; must live as long as the call.
  Metadata* trailers = nullptr;
};

}  // namespace stepwire
