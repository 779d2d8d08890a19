// The texts of a delta, and how those that were given before are cut off its beginning, for the deltas of both RPCs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stepwire/v1/chat_service.grpc.pb.h"
#include "stepwire/v1/generation_service.grpc.pb.h"

namespace stepwire {

using GenerationDelta = v1::GenerateStreamResponse::Delta;
using ChatDelta = v1::ChatStreamResponse::Delta;

// Texts that grow delta by delta, by names that are the same in each.
using NamedTexts = std::vector<std::pair<std::string, std::string*>>;

NamedTexts Texts(GenerationDelta* delta);
NamedTexts Texts(ChatDelta* delta);

bool HasReasoning(const GenerationDelta& delta);
bool HasReasoning(const ChatDelta& delta);

// Leaves out the beginnings of calls that have begun, by their index: repeated, they would have other ids.
void DropKnownCalls(GenerationDelta* delta, const std::set<std::uint32_t>& known);
void DropKnownCalls(ChatDelta* delta, const std::set<std::uint32_t>& known);

void NoteCalls(const GenerationDelta& delta, std::set<std::uint32_t>* known);
void NoteCalls(const ChatDelta& delta, std::set<std::uint32_t>* known);

// Takes known bytes off the texts, and what was taken off the counts.
template <class Delta>
void CutKnown(Delta* delta, std::map<std::string, std::size_t>* num_known) {
  for (auto& [name, text] : Texts(delta)) {
    auto& known = (*num_known)[name];
    const auto num_bytes = std::min(known, text->size());
    text->erase(0, num_bytes);
    known -= num_bytes;
  }
}

template <class Delta>
bool IsEmpty(Delta* delta) {
  for (const auto& [name, text] : Texts(delta)) {
    if (!text->empty()) return false;
  }
  std::set<std::uint32_t> calls;
  NoteCalls(*delta, &calls);
  return calls.empty() && delta->token_ids().empty() && delta->logprobs().empty();
}

}  // namespace stepwire
