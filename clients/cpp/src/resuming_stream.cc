#include "stepwire/resuming_stream.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "stepwire/client.h"

namespace stepwire {
namespace {

// Before the first resumption, where the server does not say how long; doubles each time.
constexpr std::chrono::milliseconds kFirstBackoff{100};

v1::GenerateRequest WithTokenIds(v1::GenerateRequest request) {
  request.mutable_output()->set_token_ids(true);
  return request;
}

}  // namespace

ResumingStream::ResumingStream(const Client& client, const v1::GenerateRequest& request, int max_resumes,
                               const CallOptions& options)
    : client_(client),
      request_(WithTokenIds(request)),
      options_(options),
      start_(std::chrono::steady_clock::now()),
      max_resumes_(max_resumes),
      stream_(client.GenerateStream(request_, options)) {}

bool ResumingStream::Next(v1::GenerateStreamResponse* message) {
  while (true) {
    try {
      if (!stream_.Next(message)) return false;
    } catch (const CallError& error) {
      if (!CanResume(error)) throw;
      Wait(error);
      ++num_resumes_;
      stream_ = client_.GenerateStream(request_, RemainingOptions());
      continue;
    }
    if (Note(*message)) {
      message->set_index(num_messages_++);
      return true;
    }
  }
}

bool ResumingStream::Note(const v1::GenerateStreamResponse& message) {
  if (message.has_accepted()) {
    request_.mutable_sampling()->set_seed(message.accepted().seed());
    return !std::exchange(is_accepted_, true);
  }
  if (message.has_prompt()) return !std::exchange(is_prompted_, true);
  request_.mutable_resume_output_token_ids()->mutable_ids()->MergeFrom(message.delta().token_ids());
  return true;
}

bool ResumingStream::CanResume(const CallError& error) const {
  if (!is_accepted_ || num_resumes_ >= max_resumes_ || request_.sampling().n() > 1) return false;
  // With nothing left to generate the server would refuse the request, which says less than this failure.
  const auto& stop = request_.stop();
  const auto num_tokens = static_cast<std::uint32_t>(request_.resume_output_token_ids().ids_size());
  if (stop.has_max_tokens() && num_tokens >= stop.max_tokens()) return false;
  // A server that has not yet noticed the end of the broken stream still knows the id as in flight.
  const bool is_held = num_resumes_ > 0 && error.reason == "DUPLICATE_REQUEST";
  return error.code == grpc::StatusCode::UNAVAILABLE || error.reason == "SLOW_CLIENT" || is_held;
}

void ResumingStream::Wait(const CallError& error) const {
  const auto backoff = kFirstBackoff * (1 << std::min(num_resumes_, 10));
  const auto delay = error.retry_delay.count() > 0 ? error.retry_delay : backoff;
  const auto timeout = RemainingOptions().timeout;
  std::this_thread::sleep_for(timeout.count() > 0 ? std::min(delay, timeout) : delay);
}

CallOptions ResumingStream::RemainingOptions() const {
  CallOptions options = options_;
  if (options.timeout.count() > 0) {
    const auto spent = std::chrono::steady_clock::now() - start_;
    const auto left = options.timeout - std::chrono::duration_cast<std::chrono::milliseconds>(spent);
    // 0 would mean no limit; a passed deadline fails at once.
    options.timeout = std::max(left, std::chrono::milliseconds(1));
  }
  return options;
}

}  // namespace stepwire
