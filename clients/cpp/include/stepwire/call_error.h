// A failed call, with everything that the server said about it. Never holds text of a prompt or an answer.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace stepwire {

// One field that the server refused, by its path in the request.
struct FieldViolation {
  std::string field;
  std::string description;
};

// One limit of the caller's own that was reached: whose it is, and what was used up.
struct QuotaViolation {
  std::string subject;
  std::string description;
};

class CallError : public std::runtime_error {
 public:
  // Reads the rich status, where the server sent one.
  explicit CallError(const grpc::Status& status);

  // The server says that the same request may succeed later.
  bool IsRetryable() const;

  // Output tokens that the server had sent before the call failed.
  int TokensEmitted() const;

  grpc::StatusCode code;
  std::string message;
  // stepwire's own reason, such as QUEUE_FULL; empty when no server answered.
  std::string reason;
  // Of the ErrorInfo: request_id, engine_id, tokens_emitted, retryable, and more by reason.
  std::map<std::string, std::string> metadata;
  // How long the server asks to wait before another try; 0 = it does not say.
  std::chrono::milliseconds retry_delay{0};
  std::vector<FieldViolation> violations;
  std::vector<QuotaViolation> quota;
};

// Canonical name of a status code, such as INVALID_ARGUMENT.
const char* CodeName(grpc::StatusCode code);

}  // namespace stepwire
