#include "delta_texts.h"

namespace stepwire {

NamedTexts Texts(GenerationDelta* delta) { return {{"text", delta->mutable_text()}}; }

NamedTexts Texts(ChatDelta* delta) {
  NamedTexts texts = {{"content", delta->mutable_content()}, {"reasoning", delta->mutable_reasoning()}};
  for (auto& call : *delta->mutable_tool_calls()) {
    texts.emplace_back("arguments " + std::to_string(call.index()), call.mutable_arguments());
  }
  return texts;
}

bool HasReasoning(const GenerationDelta&) { return false; }

bool HasReasoning(const ChatDelta& delta) { return !delta.reasoning().empty(); }

void DropKnownCalls(GenerationDelta*, const std::set<std::uint32_t>&) {}

void DropKnownCalls(ChatDelta* delta, const std::set<std::uint32_t>& known) {
  google::protobuf::RepeatedPtrField<v1::ToolCall> rest;
  for (auto& call : *delta->mutable_tool_calls()) {
    if (known.count(call.index()) > 0) {
      call.clear_id();
      call.clear_name();
    }
    if (!call.id().empty() || !call.name().empty() || !call.arguments().empty()) rest.Add(std::move(call));
  }
  delta->mutable_tool_calls()->Swap(&rest);
}

void NoteCalls(const GenerationDelta&, std::set<std::uint32_t>*) {}

void NoteCalls(const ChatDelta& delta, std::set<std::uint32_t>* known) {
  for (const auto& call : delta.tool_calls()) known->insert(call.index());
}

}  // namespace stepwire
