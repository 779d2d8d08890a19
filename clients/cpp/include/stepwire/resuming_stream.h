// A generation that outlives broken streams.
//
// When the stream breaks after Accepted (the server went away, or gave up on a client that was too slow) it is opened
// again where it broke: with the tokens received so far and the seed of Accepted, so that the answer is the one of an
// unbroken stream. Deltas carry token ids whatever the request says. Only requests of one choice can be resumed. The
// usage counts what the last stream generated. The timeout holds for all streams together.
#pragma once

#include <cstdint>

#include "stepwire/call_options.h"
#include "stepwire/stream.h"
#include "stepwire/v1/generation_service.pb.h"

namespace stepwire {

class Client;

class ResumingStream {
 public:
  ResumingStream(const Client& client, const v1::GenerateRequest& request, int max_resumes, const CallOptions& options);

  // Waits for the next message; false after the last one. Throws CallError when the call fails and cannot be resumed.
  // The index of the messages counts over all streams.
  bool Next(v1::GenerateStreamResponse* message);

  // Ends the call: Next() throws CANCELLED. Not while another thread is in Next().
  void Cancel() { stream_.Cancel(); }

 private:
  // Keeps what a resumption needs of a message; whether the caller has yet to see it.
  bool Note(const v1::GenerateStreamResponse& message);
  bool CanResume(const CallError& error) const;
  // Waits before a new stream, no longer than the deadline.
  void Wait(const CallError& error) const;
  CallOptions RemainingOptions() const;

  const Client& client_;
  v1::GenerateRequest request_;
  CallOptions options_;
  std::chrono::steady_clock::time_point start_;
  int max_resumes_;
  int num_resumes_ = 0;
  bool is_accepted_ = false;
  bool is_prompted_ = false;
  std::uint64_t num_messages_ = 0;
  Stream<v1::GenerateStreamResponse> stream_;
};

}  // namespace stepwire
