// The messages of one streamed answer. Not for several threads at once, but for Cancel().
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/sync_stream.h>

#include <memory>
#include <utility>

#include "stepwire/call_error.h"
#include "stepwire/call_options.h"

namespace stepwire {

// Adds what came behind the last message to `trailers`, which may be null.
void CopyTrailers(const grpc::ClientContext& context, Metadata* trailers);

template <class Message>
class Stream {
 public:
  Stream(std::unique_ptr<grpc::ClientContext> context, std::unique_ptr<grpc::ClientReader<Message>> reader,
         Metadata* trailers)
      : context_(std::move(context)), reader_(std::move(reader)), trailers_(trailers) {}

  Stream(Stream&&) noexcept = default;
  Stream& operator=(Stream&& other) noexcept {
    Abandon();
    // The reader goes first, because it uses its context until its end.
    reader_ = std::move(other.reader_);
    context_ = std::move(other.context_);
    trailers_ = other.trailers_;
    is_over_ = other.is_over_;
    return *this;
  }

  // Leaving a stream early cancels the request in the engine.
  ~Stream() { Abandon(); }

  // Waits for the next message; false after the last one. Throws CallError when the call fails.
  bool Next(Message* message) {
    if (is_over_) return false;
    if (reader_->Read(message)) return true;
    const grpc::Status status = Finish();
    if (!status.ok()) throw CallError(status);
    return false;
  }

  // Ends the call: Next() throws CANCELLED soon. From any thread, while the stream lives.
  void Cancel() { context_->TryCancel(); }

 private:
  grpc::Status Finish() {
    is_over_ = true;
    const grpc::Status status = reader_->Finish();
    CopyTrailers(*context_, trailers_);
    return status;
  }

  void Abandon() {
    if (reader_ == nullptr || is_over_) return;
    context_->TryCancel();
    Message unread;
    while (reader_->Read(&unread)) {
    }
    Finish();
  }

  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReader<Message>> reader_;
  Metadata* trailers_;
  bool is_over_ = false;
};

}  // namespace stepwire
