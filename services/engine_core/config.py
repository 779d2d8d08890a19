"""Settings of the engine core: CLI flag = environment variable STEPWIRE_* = one documented name. Frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from engine_core.client_class_options import MAX_PRIORITY, MAX_WEIGHT, MIN_PRIORITY, by_class
from engine_core.scheduler.client_classes import ClientClasses
from stepwire.exposure import check_server_tls, is_loopback, refuse_exposed
from stepwire.settings import Settings
from stepwire.tls import TlsFiles


class EngineSettings(Settings):
    """LLM engine core: owns the model, the scheduler and the KV cache; serves frontends over one gRPC stream each."""

    model_config = SettingsConfigDict(cli_prog_name="python -m engine_core")

    model: str = Field(
        "embedded",
        description="Hugging Face id, local directory, .gguf file, or 'embedded' (SmolLM2-135M-Instruct).",
    )
    revision: str = Field("", description="Revision of a Hugging Face id; empty = the newest.")
    served_model_name: str = Field("", description="Name clients use; empty = derived from --model.")
    models_dir: Path = Field(Path("models"), description="Cache for converted models and the embedded default.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and activations; auto = the checkpoint's own on a GPU, float32 on a CPU."
    )
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8 = matrices as int8, made when the model is loaded; on a CPU, native decoder only."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto = cuda where there is one.")
    model_impl: Literal["auto", "native", "transformers"] = Field(
        "auto", description="What computes the model; auto = the native decoder where it can, else transformers."
    )
    cpu_kernels: Literal["auto", "amx", "avx512", "avx2", "portable", "torch"] = Field(
        "auto",
        description="Instructions of the kernels on a CPU; auto = the best it has, torch = no compiled ones. "
        "avx512 includes BF16 and VNNI.",
    )
    attention_backend: Literal["auto", "triton", "flashinfer", "torch"] = Field(
        "auto", description="Kernels on a GPU; auto = triton. flashinfer: pip install flashinfer-python."
    )
    batch_invariant: bool = Field(
        False, description="On a GPU: a request's logits do not depend on what else is in the batch; slower."
    )
    enforce_eager: bool = Field(False, description="On a GPU: no CUDA graphs for decode steps.")
    tensor_parallel_size: int = Field(
        1, ge=1, description="Workers that share each layer, one GPU each; 1 = no workers."
    )
    pipeline_parallel_size: int = Field(1, ge=1, description="Groups of workers that share the layers out.")
    num_threads: int = Field(
        0, ge=0, le=1024, description="Math threads on a CPU; 0 = one for each usable core, with workers one in each."
    )
    seed_of_hashes: str = Field("stepwire", description="Start of every block hash chain; equal on engines that agree.")

    host: str = Field("127.0.0.1", description="Address of the engine port.")
    port: int = Field(50061, ge=0, le=65535, description="Engine port; 0 = any free one.")
    tls_cert_file: Path | None = Field(
        None, description="PEM chain of the engine port; with it the port speaks TLS alone. Read again when it changes."
    )
    tls_key_file: Path | None = Field(None, description="Its private key, PEM, without a password.")
    tls_client_ca_file: Path | None = Field(
        None, description="PEM of CAs: frontends need a certificate of one of them."
    )
    insecure: bool = Field(
        False,
        description="Allow an address other than loopback without client certificates, as behind a NetworkPolicy.",
    )
    metrics_port: int = Field(
        9101, ge=0, le=65535, description="Port of /metrics, /healthz, /readyz; 0 = any free one."
    )
    metrics_alias: Literal["vllm", "none"] = Field(
        "vllm", description="Serve metrics that other tools know by a vllm: name under that name too."
    )
    engine_id: str = Field("", description="Stable name for logs and metrics; empty = host name and port.")
    data_parallel_rank: int = Field(0, ge=0, description="Which of its replicas it is; callers can pin requests to it.")
    data_parallel_size: int = Field(1, ge=1, description="How many replicas there are; they are independent.")
    owner: Literal["none", "session", "parent"] = Field(
        "none",
        description="Whose end ends the engine: none, the last session, or the parent process (a pipe on stdin).",
    )
    orphan_timeout_s: float = Field(60.0, gt=0, description="--owner session: exit after this long without a session.")

    max_model_len: int = Field(0, ge=-1, description="Context limit; 0 = the model's own, -1 = the largest that fits.")
    max_num_seqs: int = Field(128, ge=1, description="Most requests in one step.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Token budget of one step.")
    long_prefill_token_threshold: int = Field(0, ge=0, description="Cap of one request's share of a step; 0 = none.")
    prefill_tokens_beside_decodes: int = Field(
        -1,
        ge=-1,
        description="Tokens of prompts in a step that also decodes, more beside many decodes and for many prompts, "
        "all that fit for a burst; "
        "0 = no limit, -1 = on a CPU as many as make a step of 8 decodes 1.6 times as long (measured), else none.",
    )
    max_num_partial_prefills: int = Field(
        0, ge=0, description="Prompts that may be computed in chunks at the same time; 0 = no limit."
    )
    enable_chunked_prefill: bool = Field(True, description="Split prompts that are larger than the budget.")
    enable_prefix_caching: bool = Field(True, description="Reuse the KV of equal prompt beginnings.")
    verify_prefix_hits: bool = Field(True, description="Compare the tokens of a block on a hit, not only its hash.")
    block_size: int = Field(16, ge=1, le=256, description="KV slots in one block.")
    kv_cache_memory: str = Field("", description="KV cache on a CPU, like 2GiB; empty = a share of free memory.")
    num_blocks: int = Field(0, ge=0, description="Force this many KV blocks (tests); 0 = as many as fit.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of the GPU for weights and KV cache.")
    async_scheduling: bool = Field(True, description="Plan the next step while one runs; off = one after the other.")
    reserve_full_prompt: bool = Field(
        True, description="Admit a prompt only when all of it fits the free blocks, not only its first chunk."
    )
    watermark: float = Field(0.0, ge=0, lt=1, description="Share of blocks kept free when admitting next to others.")
    pooling: Literal["auto", "mean", "last", "cls", "off"] = Field(
        "auto",
        description="What makes an embedding of a prompt's hidden states; auto = as the model's files say, else last.",
    )
    max_logprobs: int = Field(
        20,
        ge=-1,
        description="Most log-probabilities of a position; -1 = whole vocabulary: 8 bytes an entry, for experiments.",
    )
    scheduling_policy: Literal["fair", "fcfs", "priority"] = Field(
        "fair",
        description="Client classes take turns; or first come, first served, whoever asks; or by priority, and in "
        "turns within one.",
    )
    client_class_weights: str = Field(
        "", description="Shares of client classes, like gold=4,free=1; * = any class not named, 1 unless set."
    )
    client_class_best_priorities: str = Field(
        "", description="Best (lowest) priority that a client class gets, like free=0,*=-5; else as asked."
    )
    max_queued_requests: int = Field(1024, ge=1, description="Waiting requests; one more is QUEUE_FULL.")
    max_queued_tokens: int = Field(4_000_000, ge=1, description="Waiting prompt tokens; more is QUEUE_FULL.")

    enable_kv_events: bool = Field(False, description="Publish changes of the prefix cache (KvEventsService).")
    kv_events_buffer_blocks: int = Field(
        65536, ge=1, description="Changes kept for subscribers that are behind or come back; one for each block."
    )
    mfu_metrics: bool = Field(
        False,
        description="Estimate what steps compute, read and write for each worker, from their plans (estimated_*).",
    )
    check_nan: bool = Field(
        False, description="Count requests whose logits have NaN, which means reading all logits of a step once more."
    )
    kv_cache_metrics: bool = Field(False, description="Measure how long KV blocks stay and when they are used again.")
    kv_cache_metrics_sample: float = Field(0.01, gt=0, le=1, description="Share of the blocks that are measured.")

    profile_dir: Path | None = Field(None, description="Where profiles asked for by utility calls go; unset = refused.")
    trusted_dirs: str = Field(
        "", description="Directories, comma separated, below which utility calls may name weights; empty = none."
    )
    grammar_compile_timeout_s: float = Field(
        30.0, gt=0, description="A grammar that takes longer to compile is refused as invalid."
    )
    grammar_cache_bytes: int = Field(256 * 2**20, ge=0, description="Compiled grammars kept for later requests.")

    drain_timeout_s: float = Field(30.0, ge=0, description="On SIGTERM: time for running requests; 0 = abort at once.")
    ready_timeout_s: float = Field(600.0, gt=0, description="Loading the model may take this long.")
    stall_warn_s: float = Field(30.0, gt=0, description="A step longer than this makes the engine STALLED.")
    step_timeout_s: float = Field(300.0, gt=0, description="A step longer than this kills the engine.")
    ping_interval_ms: int = Field(5000, ge=100, description="How often frontends ping.")
    ping_timeout_ms: int = Field(15000, ge=200, description="How long frontends wait for a pong.")

    enable_reflection: bool = Field(True, description="Let clients such as grpcurl discover the services.")

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least severe level logged.")
    log_stats_interval_s: float = Field(10.0, ge=0, description="A line of figures this often; 0 = none.")
    log_format: Literal["text", "json"] = Field("text", description="Readable lines or one JSON object a line.")

    @property
    def trusted_directories(self) -> tuple[Path, ...]:
        return tuple(Path(part.strip()).expanduser() for part in self.trusted_dirs.split(",") if part.strip())

    @property
    def client_classes(self) -> ClientClasses:
        return ClientClasses(
            weights=by_class("--client-class-weights", self.client_class_weights, 1, MAX_WEIGHT),
            best_priorities=by_class(
                "--client-class-best-priorities", self.client_class_best_priorities, MIN_PRIORITY, MAX_PRIORITY
            ),
        )

    @property
    def tls(self) -> TlsFiles | None:
        return check_server_tls(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)

    @model_validator(mode="after")
    def _check_security(self) -> EngineSettings:
        has_client_certificates = self.tls is not None and self.tls_client_ca_file is not None
        if not (is_loopback(self.host) or has_client_certificates or self.insecure):
            remedy = "give --tls-cert-file and --tls-client-ca-file"
            raise refuse_exposed("--host", self.host, "let anybody use the engine, which trusts its frontends", remedy)
        return self

    @model_validator(mode="after")
    def _check_policy(self) -> EngineSettings:
        classes = self.client_classes
        if classes.best_priorities and self.scheduling_policy != "priority":
            raise ValueError("--client-class-best-priorities needs --scheduling-policy priority")
        if classes.weights and self.scheduling_policy == "fcfs":
            raise ValueError("--client-class-weights has no meaning with --scheduling-policy fcfs")
        if self.max_num_partial_prefills and not self.enable_chunked_prefill:
            raise ValueError("--max-num-partial-prefills has no meaning with --no-enable-chunked-prefill")
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> EngineSettings:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}): each running request needs one token of every step"
            )
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(
                f"--data-parallel-rank ({self.data_parallel_rank}) must be below --data-parallel-size "
                f"({self.data_parallel_size})"
            )
        if self.enable_kv_events and not self.enable_prefix_caching:
            raise ValueError("--enable-kv-events needs --enable-prefix-caching: without it there is nothing to publish")
        if self.stall_warn_s >= self.step_timeout_s:
            raise ValueError("--stall-warn-s must be below --step-timeout-s")
        return self
