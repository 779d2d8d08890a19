#include "stepwire/call_error.h"

#include <cstdlib>
#include <iterator>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace stepwire {
namespace {

google::rpc::Status ReadDetails(const grpc::Status& status) {
  google::rpc::Status rich;
  // Without details, or with ones that a proxy has spoiled, code and message are all there is.
  if (!rich.ParseFromString(status.error_details())) rich.Clear();
  return rich;
}

std::string ReadReason(const google::rpc::Status& rich) {
  google::rpc::ErrorInfo info;
  for (const auto& detail : rich.details()) {
    if (detail.UnpackTo(&info)) return info.reason();
  }
  return "";
}

std::string Describe(const grpc::Status& status) {
  const std::string reason = ReadReason(ReadDetails(status));
  return std::string(CodeName(status.error_code())) + (reason.empty() ? "" : " " + reason) + ": " +
         status.error_message();
}

std::chrono::milliseconds ToMilliseconds(const google::protobuf::Duration& duration) {
  return std::chrono::milliseconds(duration.seconds() * 1000 + duration.nanos() / 1'000'000);
}

}  // namespace

CallError::CallError(const grpc::Status& status)
    : std::runtime_error(Describe(status)), code(status.error_code()), message(status.error_message()) {
  const google::rpc::Status rich = ReadDetails(status);
  reason = ReadReason(rich);
  google::rpc::ErrorInfo info;
  google::rpc::RetryInfo retry;
  google::rpc::BadRequest bad_request;
  google::rpc::QuotaFailure quota_failure;
  for (const auto& detail : rich.details()) {
    if (detail.UnpackTo(&info)) {
      metadata.insert(info.metadata().begin(), info.metadata().end());
    } else if (detail.UnpackTo(&retry)) {
      retry_delay = ToMilliseconds(retry.retry_delay());
    } else if (detail.UnpackTo(&bad_request)) {
      for (const auto& violation : bad_request.field_violations()) {
        violations.push_back({violation.field(), violation.description()});
      }
    } else if (detail.UnpackTo(&quota_failure)) {
      for (const auto& violation : quota_failure.violations()) {
        quota.push_back({violation.subject(), violation.description()});
      }
    }
  }
}

bool CallError::IsRetryable() const {
  const auto found = metadata.find("retryable");
  return found != metadata.end() && found->second == "true";
}

int CallError::TokensEmitted() const {
  const auto found = metadata.find("tokens_emitted");
  return found == metadata.end() ? 0 : std::atoi(found->second.c_str());
}

const char* CodeName(grpc::StatusCode code) {
  static constexpr const char* kNames[] = {
      "OK",           "CANCELLED",         "UNKNOWN",           "INVALID_ARGUMENT",    "DEADLINE_EXCEEDED",
      "NOT_FOUND",    "ALREADY_EXISTS",    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED",  "FAILED_PRECONDITION",
      "ABORTED",      "OUT_OF_RANGE",      "UNIMPLEMENTED",     "INTERNAL",            "UNAVAILABLE",
      "DATA_LOSS",    "UNAUTHENTICATED",
  };
  const int number = code;
  return number >= 0 && number < static_cast<int>(std::size(kNames)) ? kNames[number] : "UNKNOWN";
}

}  // namespace stepwire
