"""Settings of inference: which model, where it runs, and how much of the machine it may take."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from telemetry.setting_marks import MAY_CHANGE

AdapterMode = Literal["auto", "slots", "merge_reload"]


class InferenceSettings(BaseModel):
    """The model that plays and the engine, or workers, that draw its decisions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str = "tiny"
    """'tiny' (made on the spot), a local folder, or a hub id such as 'Qwen/Qwen2.5-7B-Instruct'."""
    urls: Annotated[tuple[str, ...], MAY_CHANGE] = ()
    """Addresses of running workers (`entente serve`), such as 'http://127.0.0.1:8100'; none: an engine in this process."""
    key_variable: Annotated[str, MAY_CHANGE] = "ENTENTE_KEY"
    """Name of the environment variable that holds the workers' key; the key itself is never written to a file."""
    engine: Literal["auto", "vllm", "vllm_async", "torch"] = "auto"
    """What draws on this machine: vLLM where it is installed, else the smaller torch engine, which needs nothing beyond what
    training needs; or always the one named. 'vllm' computes in this process, as suits a CPU, 'vllm_async' beside it, as suits
    a GPU."""
    adapters: AdapterMode = "auto"
    """How policy versions are served: 'slots', each a LoRA adapter beside the others; 'merge_reload', one at a time as merged
    weights, much faster on a CPU and exact in float32 only; 'auto': slots, unless a short calibration finds them dear."""
    adapter_slots: Annotated[int, Field(ge=1, le=64)] = 4
    """Adapters held at a time (vLLM's max_loras): the staleness budget and two more, and one for each version that plays beside
    training."""
    adapter_rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Highest adapter rank that slots take (vLLM's max_lora_rank); what exceeds the adapters' own rank is padding that costs."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Number format of weights and activations; float32 on the CPU, where merged updates must not be rounded away."""
    max_sequences: Annotated[int, MAY_CHANGE, Field(ge=1, le=4096)] = 128
    """Requests decoded together, at most (vLLM's max_num_seqs)."""
    max_batched_tokens: Annotated[int, MAY_CHANGE, Field(ge=256)] = 4096
    """Tokens of one forward pass, at most (vLLM's max_num_batched_tokens); on the CPU prompts are not cut, so at least
    max_model_length."""
    max_model_length: Annotated[int, Field(ge=64)] = 1024
    """Longest prompt plus completion, tokens; a longer prompt is an error, never cut."""
    block_size: Annotated[int, MAY_CHANGE, Field(ge=16, le=128, multiple_of=16)] = 32
    """Tokens of one prefix-cache block; only whole blocks are shared, and vLLM on the CPU needs a multiple of 32."""
    prefix_caching: bool = True
    """Keep the key-value blocks of prompts for later prompts that begin alike (vLLM's enable_prefix_caching)."""
    long_prefill_tokens: Annotated[int, Field(ge=0)] = 0
    """Prompts of more tokens are prefilled beside others only in part (vLLM's long_prefill_token_threshold); 0: no such rule."""
    quantization: str = ""
    """vLLM's name of a weight format, such as 'fp8'; empty: as the weights are. Rows of a quantised policy must agree with the
    unquantised trainer within the run's mismatch bounds, or the run does not start."""
    model_runner: Literal["v1", "v2"] = "v1"
    """vLLM's model runner: 'v2' needs Triton, and its legal-order adapter was never run on a real card."""
    jump_forced: Literal["auto", "on", "off"] = "auto"
    """Take tokens that are the only legal ones together with the drawn one before them, instead of a forward pass each; on a GPU
    it switches asynchronous scheduling off, and what it wins there was never measured. 'auto': on the CPU only."""
    enforce_eager: Literal["auto", "on", "off"] = "auto"
    """Run without CUDA graphs and compiling (vLLM's enforce_eager): slower, quick to start; 'auto': on the CPU only."""
    compile_cache: str = ""
    """Folder where vLLM keeps what it compiled (VLLM_CACHE_ROOT), on a disk that outlives the machine; empty: vLLM's own."""
    kv_cache_gib: Annotated[int, MAY_CHANGE, Field(ge=1)] = 1
    """Memory of the key-value cache on the CPU, GiB."""
    gpu_memory_share: Annotated[float, MAY_CHANGE, Field(gt=0, lt=1)] = 0.85
    """Share of the GPU's memory that the engine may take; lower it where the trainer sits on the same card."""
    threads: Annotated[int, MAY_CHANGE, Field(ge=0)] = 0
    """CPU threads of the engine; 0: planned from the cores and from what computes at the same time."""
    start_timeout_s: Annotated[float, MAY_CHANGE, Field(gt=0)] = 300.0
    """Seconds until an engine or a worker must be ready."""
    request_timeout_s: Annotated[float, MAY_CHANGE, Field(gt=0)] = 120.0
    """Seconds until a worker must have answered one request."""
    max_in_flight: Annotated[int, MAY_CHANGE, Field(ge=1, le=4096)] = 128
    """Requests that one worker may have in flight, at most; lowered while it queues or preempts, and raised again."""
    long_prompt_tokens: Annotated[int, MAY_CHANGE, Field(ge=0)] = 0
    """Prompts of so many tokens and more go to the last of `urls`, all others to the others, so that short ones do not wait
    behind long ones; while one side has no worker left the other takes both. 0: any prompt to any worker."""
    evaluation_urls: Annotated[tuple[str, ...], MAY_CHANGE] = ()
    """Addresses of workers kept for evaluation, so that scoring leaves the rollouts' prefixes warm; none: those of `urls`."""
    heartbeat_s: Annotated[float, MAY_CHANGE, Field(gt=0)] = 10.0
    """Seconds between two looks at a worker, and until it must have answered; after two in vain it gets no more work and its
    requests go elsewhere. One that was lost is looked at sooner, and then ever more rarely, up to this."""
    scrape_s: Annotated[float, MAY_CHANGE, Field(ge=0)] = 10.0
    """Seconds between two readings of a worker's Prometheus page (its queue, its key-value cache), which go into the run's
    figures and into its workers.jsonl; 0: never."""
    no_worker_timeout_s: Annotated[float, MAY_CHANGE, Field(ge=0)] = 120.0
    """Seconds to wait for a worker to come back when none is left, or start_timeout_s for one that says that it warms up; then
    requests fail with a sentence."""

    @property
    def for_evaluation(self) -> "InferenceSettings":
        """These settings with the workers kept for evaluation, where there are any."""
        return self.model_copy(update={"urls": self.evaluation_urls}) if self.evaluation_urls else self
