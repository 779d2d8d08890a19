// One answer over several streams: what to ask for after a break, and what of the next stream is new.
//
// The tokens so far are sent along, with the seed of Accepted, and the server goes on behind them as if nothing had
// happened. All but those of the last delta: whether the answer had ended with them is what the break may have hidden.
// They are generated again, compared, and not given twice.
#pragma once

#include <algorithm>
#include <optional>

#include "delta_texts.h"
#include "stepwire/call_error.h"

namespace stepwire {

// The error of a server that generates other tokens than those that were given.
inline CallError Diverged() {
  return CallError({grpc::StatusCode::UNAVAILABLE, "the resumed answer has become another one"});
}

inline bool IsPrompt(const v1::GenerateStreamResponse& message) { return message.has_prompt(); }
inline bool IsPrompt(const v1::ChatStreamResponse&) { return false; }

template <class Request, class Message>
class Answer {
 public:
  explicit Answer(Request request)
      : request_(std::move(request)), shows_token_ids_(request_.output().token_ids()) {
    request_.mutable_output()->set_token_ids(true);
    const auto& own = request_.resume_output_token_ids().ids();
    kept_.assign(own.begin(), own.end());
    num_before_ = kept_.size();
  }

  bool HasBegun() const { return accepted_.has_value(); }

  // False where the server would refuse, or echo the prompt into the middle of the answer.
  bool CanBeResumed() const { return request_.sampling().n() <= 1 && !request_.output().echo_prompt(); }

  // How many output tokens the caller has.
  std::size_t NumTokens() const { return kept_.size() - num_before_ + last_.token_ids.size(); }

  // The request of the next stream.
  const Request& Next() {
    num_resumed_ = kept_.size() - num_before_;
    num_resumed_reasoning_ = num_kept_reasoning_;
    expected_ = last_;
    request_.mutable_resume_output_token_ids()->mutable_ids()->Assign(kept_.begin(), kept_.end());
    if (accepted_) {
      request_.set_request_id(accepted_->request_id());
      request_.mutable_sampling()->set_seed(accepted_->seed());
    }
    return request_;
  }

  // Reduces a message to what is new in it; whether anything is. Throws Diverged().
  bool Take(Message* message) {
    if (!TakeEvent(message)) return false;
    message->set_index(num_given_++);
    return true;
  }

 private:
  using Delta = typename Message::Delta;

  // Output that was given since the tokens that the next stream starts behind.
  struct Stretch {
    std::vector<std::uint32_t> token_ids;
    std::uint32_t num_reasoning = 0;
    // Of each text, by its name.
    std::map<std::string, std::size_t> num_bytes;
  };

  bool TakeEvent(Message* message) {
    if (message->has_accepted()) return TakeAccepted(message->accepted());
    if (message->has_delta()) return TakeDelta(message->mutable_delta());
    if (message->has_finished()) {
      TakeFinished(message->mutable_finished());
    } else if (IsPrompt(*message)) {
      // It would come again with the next stream.
      request_.mutable_output()->clear_prompt_logprobs();
    }
    return true;
  }

  bool TakeAccepted(const typename Message::Accepted& accepted) {
    if (!accepted_) {
      accepted_ = accepted;
      return true;
    }
    // Another model stands there now, and its text would be no continuation.
    if (accepted_->model() != accepted.model()) throw Diverged();
    return false;
  }

  bool TakeDelta(Delta* delta) {
    DropExpected(delta);
    const auto& ids = delta->token_ids();
    if (!ids.empty()) {
      CloseStretch();
      last_.token_ids.assign(ids.begin(), ids.end());
      if (HasReasoning(*delta)) last_.num_reasoning = static_cast<std::uint32_t>(ids.size());
    }
    for (const auto& [name, text] : Texts(delta)) last_.num_bytes[name] += text->size();
    NoteCalls(*delta, &known_calls_);
    if (!shows_token_ids_) delta->clear_token_ids();
    return !IsEmpty(delta);
  }

  // Leaves what is new in a delta.
  void DropExpected(Delta* delta) {
    auto& expected = expected_.token_ids;
    auto* ids = delta->mutable_token_ids();
    const auto num = std::min(expected.size(), static_cast<std::size_t>(ids->size()));
    if (!std::equal(expected.begin(), expected.begin() + num, ids->begin())) Diverge();
    expected.erase(expected.begin(), expected.begin() + num);
    ids->erase(ids->begin(), ids->begin() + num);
    auto* rows = delta->mutable_logprobs();
    rows->DeleteSubrange(0, std::min(static_cast<int>(num), rows->size()));
    CutKnown(delta, &expected_.num_bytes);
    DropKnownCalls(delta, known_calls_);
  }

  void TakeFinished(typename Message::Finished* finished) {
    // It ends before that which was given does.
    if (!expected_.token_ids.empty()) Diverge();
    if (!finished->has_usage()) return;
    // The server leaves out what it did not generate in this stream.
    auto* usage = finished->mutable_usage();
    usage->set_completion_tokens(usage->completion_tokens() + static_cast<std::uint32_t>(num_resumed_));
    usage->set_reasoning_tokens(usage->reasoning_tokens() + num_resumed_reasoning_);
  }

  void CloseStretch() {
    kept_.insert(kept_.end(), last_.token_ids.begin(), last_.token_ids.end());
    num_kept_reasoning_ += last_.num_reasoning;
    last_ = {};
  }

  // The next stream is to hold on to all that was given.
  [[noreturn]] void Diverge() {
    CloseStretch();
    throw Diverged();
  }

  Request request_;
  bool shows_token_ids_;
  std::optional<typename Message::Accepted> accepted_;
  std::uint64_t num_given_ = 0;
  // Tokens before the last stretch, which the next stream starts behind; num_before_ of them are the caller's own.
  std::vector<std::uint32_t> kept_;
  std::size_t num_before_ = 0;
  std::uint32_t num_kept_reasoning_ = 0;
  // The same at the beginning of this stream, without the caller's own.
  std::size_t num_resumed_ = 0;
  std::uint32_t num_resumed_reasoning_ = 0;
  // What was given since then, and what of it this stream has yet to repeat.
  Stretch last_;
  Stretch expected_;
  std::set<std::uint32_t> known_calls_;
};

}  // namespace stepwire
