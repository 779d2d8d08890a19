#include "stepwire/resuming_stream.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "answer.h"

namespace stepwire {
namespace {

// The waits before a resumption where the server does not say how long: doubled each time, up to a limit.
constexpr std::chrono::milliseconds kFirstBackoff{200};
constexpr std::chrono::milliseconds kMaxBackoff{5'000};

}  // namespace

template <class Request, class Message>
ResumingStream<Request, Message>::ResumingStream(Open open, const Request& request, int max_resumes,
                                                 const CallOptions& options)
    : open_(std::move(open)),
      options_(options),
      start_(std::chrono::steady_clock::now()),
      max_resumes_(max_resumes),
      answer_(std::make_unique<Answer<Request, Message>>(request)),
      stream_(open_(answer_->Next(), options_)) {}

template <class Request, class Message>
ResumingStream<Request, Message>::ResumingStream(ResumingStream&&) noexcept = default;

template <class Request, class Message>
ResumingStream<Request, Message>::~ResumingStream() = default;

template <class Request, class Message>
bool ResumingStream<Request, Message>::Next(Message* message) {
  while (true) {
    try {
      if (!stream_.Next(message)) return false;
      if (answer_->Take(message)) return true;
    } catch (CallError& error) {
      if (num_resumes_ > 0) error.metadata["tokens_emitted"] = std::to_string(answer_->NumTokens());
      if (!CanResume(error)) throw;
      Wait(error);
      ++num_resumes_;
      stream_ = open_(answer_->Next(), RemainingOptions());
    }
  }
}

template <class Request, class Message>
bool ResumingStream<Request, Message>::CanResume(const CallError& error) const {
  if (!answer_->HasBegun() || !answer_->CanBeResumed() || num_resumes_ >= max_resumes_) return false;
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
