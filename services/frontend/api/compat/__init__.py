"""vllm.grpc.engine.VllmEngine for gateways that speak it, over the same path as stepwire's own services.

The messages come from the package smg-grpc-proto, which is optional: nothing outside this package imports it, and this
package is imported only where it is served.
"""
