// A generation that outlives broken streams.
//
// When its stream breaks after Accepted (the server went away, or gave up on a client that was too slow) it is opened
// again where it broke: with the tokens received so far and the seed of Accepted, so that the answer is the one of an
// unbroken stream, sampled or not, and nothing comes twice. Only answers of one choice, without an echo of the prompt,
// can be resumed. The timeout holds for all streams together; the timings are those of the last one.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "stepwire/call_options.h"
#include "stepwire/stream.h"

namespace stepwire {

template <class Request, class Message>
class Answer;

// Request and Message are those of GenerateStream or of ChatStream.
template <class Request, class Message>
class ResumingStream {
 public:
  using Open = std::function<Stream<Message>(const Request&, const CallOptions&)>;

  // The stream is opened at once, and at most `max_resumes` times again.
  ResumingStream(Open open, const Request& request, int max_resumes, const CallOptions& options);
  ResumingStream(ResumingStream&&) noexcept;
  ~ResumingStream();

  // Waits for the next message; false after the last one. Throws CallError when the call fails and cannot be resumed.
  // The index of the messages counts over all streams.
  bool Next(Message* message);

  // Ends the call: Next() throws CANCELLED. Not while another thread is in Next().
  void Cancel() { stream_.Cancel(); }

 private:
  bool CanResume(const CallError& error) const;
  // Waits before a new stream, no longer than the deadline.
  void Wait(const CallError& error) const;
  CallOptions RemainingOptions() const;

  Open open_;
  CallOptions options_;
  std::chrono::steady_clock::time_point start_;
  int max_resumes_;
  int num_resumes_ = 0;
  std::unique_ptr<Answer<Request, Message>> answer_;
  Stream<Message> stream_;
};

}  // namespace stepwire
