package stepwire

import (
	"fmt"

	"google.golang.org/protobuf/proto"
)

// codec speaks protobuf's second Go API, which the stubs are made for. The default codec of gRPC before 1.36 speaks the
// first one, and panics on them.
type codec struct{}

func (codec) Marshal(value interface{}) ([]byte, error) {
	message, ok := value.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("stepwire: %T is no protobuf message", value)
	}
	return proto.Marshal(message)
}

func (codec) Unmarshal(data []byte, value interface{}) error {
	message, ok := value.(proto.Message)
	if !ok {
		return fmt.Errorf("stepwire: %T is no protobuf message", value)
	}
	return proto.Unmarshal(data, message)
}

func (codec) Name() string { return "proto" }
