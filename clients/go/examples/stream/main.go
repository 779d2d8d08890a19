// Stream prints an answer while it is generated: stream [TARGET [PROMPT]].
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/protobuf/proto"

	"stepwire"
	v1 "stepwire/v1"
)

func main() {
	target, prompt := "127.0.0.1:50051", "The capital of France is"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	if len(os.Args) > 2 {
		prompt = os.Args[2]
	}
	if err := stream(target, prompt); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		var failure *stepwire.Error
		if errors.As(err, &failure) && failure.Retryable() {
			fmt.Fprintln(os.Stderr, "try again in", failure.RetryDelay)
		}
		os.Exit(1)
	}
}

func stream(target, prompt string) error {
	client, err := stepwire.Connect(target, stepwire.Options{Token: os.Getenv("STEPWIRE_TOKEN")})
	if err != nil {
		return err
	}
	defer client.Close()
	// The deadline holds in the engine, too; leaving this function cancels what still runs.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	answer, err := client.GenerateResuming(ctx, &v1.GenerateRequest{
		Prompt: &v1.GenerateRequest_Text{Text: prompt},
		Stop:   &v1.StopConditions{MaxTokens: proto.Uint32(64)},
	}, 3)
	if err != nil {
		return err
	}
	for {
		message, err := answer.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(message.GetDelta().GetText())
		if finished := message.GetFinished(); finished != nil {
			fmt.Printf("\n[%s, %d tokens]\n", finished.Reason, finished.GetUsage().GetCompletionTokens())
		}
	}
}
