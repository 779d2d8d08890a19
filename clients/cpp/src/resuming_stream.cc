#include "stepwire/resuming_stream.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "stepwire/v1/chat_service.grpc.pb.h"
#include "stepwire/v1/generation_service.grpc.pb.h"

namespace stepwire {
namespace {

// The waits before a resumption where the server does not say how long: doubled each time, up to a limit.
constexpr std::chrono::milliseconds kFirstBackoff{200};
constexpr std::chrono::milliseconds kMaxBackoff{5'000};

template <class Request>
Request WithTokenIds(Request request) {
  request.mutable_output()->set_token_ids(true);
  return request;
}

bool IsPrompt(const v1::GenerateStreamResponse& message) { return message.has_prompt(); }

bool IsPrompt(const v1::ChatStreamResponse&) { return false; }

// Where this is false the server would refuse, which says less than the failure that came before.
template <class Request>
bool CanBeResumed(const Request& request) {
  const auto num_tokens = static_cast<std::uint32_t>(request.resume_output_token_ids().ids_size());
  const bool is_full = request.stop().has_max_tokens() && num_tokens >= request.stop().max_tokens();
  return request.sampling().n() <= 1 && !is_full;
}

}  // namespace

template <class Request, class Message>
ResumingStream<Request, Message>::ResumingStream(Open open, Request request, int max_resumes,
                                                 const CallOptions& options)
    : open_(std::move(open)),
      request_(WithTokenIds(std::move(request))),
      options_(options),
      start_(std::chrono::steady_clock::now()),
      max_resumes_(max_resumes),
      stream_(open_(request_, options_)) {}

template <class Request, class Message>
bool ResumingStream<Request, Message>::Next(Message* message) {
  while (true) {
    try {
      if (!stream_.Next(message)) return false;
    } catch (const CallError& error) {
      if (!CanResume(error)) throw;
      Wait(error);
      ++num_resumes_;
      stream_ = open_(request_, RemainingOptions());
      continue;
    }
    if (Note(*message)) {
      message->set_index(num_messages_++);
      return true;
    }
  }
}

template <class Request, class Message>
bool ResumingStream<Request, Message>::Note(const Message& message) {
  if (message.has_accepted()) {
    request_.set_request_id(message.accepted().request_id());
    request_.mutable_sampling()->set_seed(message.accepted().seed());
    return !std::exchange(is_accepted_, true);
  }
  if (IsPrompt(message)) return !std::exchange(is_prompted_, true);
  request_.mutable_resume_output_token_ids()->mutable_ids()->MergeFrom(message.delta().token_ids());
  return true;
}

template <class Request, class Message>
bool ResumingStream<Request, Message>::CanResume(const CallError& error) const {
  if (!is_accepted_ || num_resumes_ >= max_resumes_ || !CanBeResumed(request_)) return false;
  // A server that has not yet noticed the end of the broken stream still knows its id as in flight.
  const bool is_held = num_resumes_ > 0 && error.reason == "DUPLICATE_REQUEST";
  return error.code == grpc::StatusCode::UNAVAILABLE || error.reason == "SLOW_CLIENT" || is_held;
}

template <class Request, class Message>
void ResumingStream<Request, Message>::Wait(const CallError& error) const {
  const auto backoff = std::min(kFirstBackoff * (1 << std::min(num_resumes_, 10)), kMaxBackoff);
  const auto delay = error.retry_delay.count() > 0 ? error.retry_delay : backoff;
  const auto timeout = RemainingOptions().timeout;
  std::this_thread::sleep_for(timeout.count() > 0 ? std::min(delay, timeout) : delay);
}

template <class Request, class Message>
CallOptions ResumingStream<Request, Message>::RemainingOptions() const {
  CallOptions options = options_;
  if (options.timeout.count() > 0) {
    const auto spent = std::chrono::steady_clock::now() - start_;
    const auto left = options.timeout - std::chrono::duration_cast<std::chrono::milliseconds>(spent);
    // 0 would mean no limit; a passed deadline fails at once.
    options.timeout = std::max(left, std::chrono::milliseconds(1));
  }
  return options;
}

template class ResumingStream<v1::GenerateRequest, v1::GenerateStreamResponse>;
template class ResumingStream<v1::ChatRequest, v1::ChatStreamResponse>;

}  // namespace stepwire
