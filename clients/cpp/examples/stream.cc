// Prints an answer while it is generated: stream [TARGET [PROMPT]].
#include <cstdlib>
#include <iostream>

#include "stepwire/client.h"

int main(int argc, char** argv) {
  const std::string target = argc > 1 ? argv[1] : "127.0.0.1:50051";
  const char* token = std::getenv("STEPWIRE_TOKEN");
  const stepwire::Client client(target, {token ? token : "", nullptr, ""});

  stepwire::v1::GenerateRequest request;
  request.set_text(argc > 2 ? argv[2] : "The capital of France is");
  request.mutable_stop()->set_max_tokens(64);
  // The deadline holds in the engine, too; leaving the stream early cancels what still runs.
  stepwire::CallOptions options;
  options.timeout = std::chrono::minutes(1);
  try {
    auto answer = client.GenerateResuming(request, 3, options);
    stepwire::v1::GenerateStreamResponse message;
    while (answer.Next(&message)) {
      std::cout << message.delta().text() << std::flush;
      if (message.has_finished()) {
        const auto& finished = message.finished();
        std::cout << "\n[" << stepwire::v1::FinishReason_Name(finished.reason()) << ", "
                  << finished.usage().completion_tokens() << " tokens]\n";
      }
    }
  } catch (const stepwire::CallError& error) {
    std::cerr << "error: " << error.what() << '\n';
    if (error.IsRetryable()) std::cerr << "try again in " << error.retry_delay.count() << " ms\n";
    return 1;
  }
}
