// Conformance makes the calls that it reads from standard input, one JSON object a line, and writes what came of each:
// conformance TARGET [CA_FILE]. It is what tests/conformance runs; it knows no scenario and expects nothing.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"syscall"

	"google.golang.org/grpc/credentials"

	"stepwire"
)

func main() {
	enableRetries()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// enableRetries starts this program again where gRPC has not been told to retry: before 1.40 it reads a variable for
// that, before main is called.
func enableRetries() {
	const name = "GRPC_GO_RETRY"
	if os.Getenv(name) == "" {
		if self, err := os.Executable(); err == nil {
			_ = syscall.Exec(self, os.Args, append(os.Environ(), name+"=on"))
		}
	}
}

func run() error {
	if len(os.Args) < 2 {
		return fmt.Errorf("usage: conformance TARGET [CA_FILE]")
	}
	options := stepwire.Options{Token: os.Getenv("STEPWIRE_TOKEN")}
	if len(os.Args) > 2 {
		transport, err := credentials.NewClientTLSFromFile(os.Args[2], "")
		if err != nil {
			return err
		}
		options.TransportCredentials = transport
	}
	client, err := stepwire.Connect(os.Args[1], options)
	if err != nil {
		return err
	}
	defer client.Close()
	return answerLines(client)
}

func answerLines(client *stepwire.Client) error {
	// Lines are as long as the prompts in them, so this is no bufio.Scanner, which has a limit.
	input, output := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		line, err := input.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			result, failure := answer(client, line)
			if failure != nil {
				return failure
			}
			if failure := output.Encode(result); failure != nil {
				return failure
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func answer(client *stepwire.Client, line []byte) (*result, error) {
	var asked call
	if err := json.Unmarshal(line, &asked); err != nil {
		return nil, err
	}
	method, known := methods[asked.Method]
	if !known {
		return nil, fmt.Errorf("unknown method %q", asked.Method)
	}
	return asked.answer(client, method)
}
